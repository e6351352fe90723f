#!/bin/bash
# Runs a command beside two hosts, node0 and node1: network namespaces with addresses and names of
# their own, joined by a bridge. To be started in namespaces of mounts, network and processes:
# whatever is left of it ends with those.
#   unshare --mount --net --pid --fork --kill-child --mount-proc two_hosts.sh FOLDER COMMAND...
set -euo pipefail
folder=$1
shift
mount --make-rprivate /
mkdir -p /run/netns
mount -t tmpfs tmpfs /run/netns
printf '%s\n' '127.0.0.1 localhost' '10.77.0.1 node0' '10.77.0.2 node1' > "$folder/hosts"
mount --bind "$folder/hosts" /etc/hosts
ip link set lo up
ip link add bridge type bridge
ip addr add 10.77.0.254/24 dev bridge
ip link set bridge up
for number in 0 1; do
  node=node$number
  ip netns add $node
  ip link add out$number type veth peer name eth0 netns $node
  ip link set out$number master bridge up
  ip netns exec $node ip link set lo up
  ip netns exec $node ip addr add 10.77.0.$((number + 1))/24 dev eth0
  ip netns exec $node ip link set eth0 up
done
"$@"
