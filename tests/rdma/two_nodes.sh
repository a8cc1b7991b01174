# Runs a command on node A of two: network namespaces A and B, joined by a cable (veth), each with a
# Soft-RoCE device of its own. The command reaches B by `ip netns exec B`.
set -e
rdma system set netns exclusive
ip netns add A
ip netns add B
ip link add cable0 netns A type veth peer name cable0 netns B
for node in "A 10.2.0.1" "B 10.2.0.2"; do
  set -- $node "$@"
  ip -n $1 link set lo up
  ip -n $1 addr add $2/24 dev cable0
  ip -n $1 link set cable0 mtu 9000 up
  ip netns exec $1 rdma link add rxe_$1 type rxe netdev cable0
  rdma dev set rxe_$1 netns $1
  shift 2
done
exec ip netns exec A "$@"
