# Runs a command on node A of two: network namespaces A and B, joined by two cables (veth), at each end of
# which is a Soft-RoCE device. The command reaches B by `ip netns exec B`.
set -e
rdma system set netns exclusive
ip netns add A
ip netns add B
join() { # node, cable, address
  ip -n $1 link set lo up
  ip -n $1 addr add $3/24 dev cable$2
  ip -n $1 link set cable$2 mtu 9000 up
  ip netns exec $1 rdma link add card$1$2 type rxe netdev cable$2
  rdma dev set card$1$2 netns $1
}
for cable in 0 1; do
  ip link add cable$cable netns A type veth peer name cable$cable netns B
  join A $cable 10.2.$cable.1
  join B $cable 10.2.$cable.2
done
exec ip netns exec A "$@"
