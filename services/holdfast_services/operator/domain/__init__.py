"""Rules of the operator: pure, from objects of Kubernetes and orders to what is to be done."""
