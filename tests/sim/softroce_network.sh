# Makes $1 Soft-RoCE devices rxe0, rxe1 … on veth ends nic0, nic1 … of one bridge, with addresses 10.77.0.1, 10.77.0.2 …
# Sourced by the job in the virtual machine. Everything stays in one network namespace, because rxe receives in no other.
set -e
ip link set lo up
ip link add bridge0 type bridge
ip link set bridge0 up
# Or the bridge answers for the devices' addresses with its own.
echo 8 >/proc/sys/net/ipv4/conf/bridge0/arp_ignore
# Packets between two addresses of one host take the loopback unless the table of local addresses comes last.
ip rule add pref 30 lookup local
ip rule del pref 0
echo 0 >/proc/sys/net/ipv4/conf/all/rp_filter
for i in $(seq 0 $(($1 - 1))); do
  address=10.77.0.$((i + 1))
  # 4200 bytes hold the largest RDMA MTU (4096) and its headers.
  ip link add "nic$i" mtu 4200 type veth peer name "port$i" mtu 4200
  ip link set "port$i" master bridge0 up
  for setting in accept_local=1 rp_filter=0 arp_ignore=1 arp_announce=2; do
    echo "${setting#*=}" >"/proc/sys/net/ipv4/conf/nic$i/${setting%=*}"
  done
  ip addr add "$address/24" dev "nic$i"
  ip link set "nic$i" up
  ip rule add pref 10 from "$address" to "$address" lookup local
  ip rule add pref 20 from "$address" iif lo lookup $((100 + i))
  ip route add 10.77.0.0/24 dev "nic$i" src "$address" table $((100 + i))
  rdma link add "rxe$i" type rxe netdev "nic$i"
done
for attempt in $(seq 50); do
  active=$(cat /sys/class/infiniband/rxe*/ports/1/state | grep -c ACTIVE || true)
  [ "$active" -eq "$1" ] && break
  sleep 0.1
done
[ "$active" -eq "$1" ]
set +e
