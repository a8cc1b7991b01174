"""What people, tools and executors ask over HTTP."""
