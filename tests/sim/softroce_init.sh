#!/bin/busybox sh
# /init of the Soft-RoCE machine: loads modules, shows the host's root read-only with a writable layer in memory on top,
# starts the job in it, and switches the machine off. /modules.boot and /modules.rdma list module files in order.
busybox=/bin/busybox
fail() { echo "softroce: $*"; $busybox poweroff -f; }
for applet in mount mkdir insmod cat sync poweroff chroot; do eval "$applet() { $busybox $applet \"\$@\"; }"; done

mkdir -p /proc /sys /dev /host /upper /root
mount -t proc proc /proc; mount -t sysfs sys /sys; mount -t devtmpfs dev /dev
for module in $(cat /modules.boot); do insmod "/modules/$module" || echo "softroce: insmod $module failed"; done

options=trans=virtio,version=9p2000.L,msize=512000
mount -t 9p -o "$options,ro,cache=loose" host /host || fail "cannot mount the host's root"
mount -t tmpfs tmpfs /upper; mkdir /upper/data /upper/work
mount -t overlay -o lowerdir=/host,upperdir=/upper/data,workdir=/upper/work root /root || fail "cannot mount the overlay"
mkdir -p /root/job; mount -t 9p -o "$options,cache=none" job /root/job || fail "cannot mount the job's folder"

for module in $(cat /modules.rdma); do insmod "/modules/$module" || echo "softroce: insmod $module failed"; done
for folder in dev proc sys; do mount --move "/$folder" "/root/$folder"; done
mkdir -p /root/dev/shm /root/dev/pts
mount -t tmpfs shm /root/dev/shm; mount -t devpts pts /root/dev/pts; mount -t tmpfs run /root/run

chroot /root /bin/sh /job/run.sh >/root/job/output 2>&1
echo $? >/root/job/status
sync; poweroff -f
