#!/bin/bash
# on_node.sh NUMBER COMMAND...: runs a command on a host of two_hosts.sh, under the host's name.
exec ip netns exec "node$1" unshare --uts bash -c 'hostname "$0"; exec "$@"' "node$1" "${@:2}"
