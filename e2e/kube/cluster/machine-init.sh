#!/bin/sh
# The first program of a machine, in namespaces of its own (mounts, processes, network, host name,
# IPC). The machine sees the host's programs, but everything it writes stays in its own directory,
# and everything it mounts, starts or configures ends with this process.
set -eu
name=$1 home=$2 programs=$3
root=$home/root
PATH=$PATH:/usr/sbin:/sbin

hostname "$name"
ip link set lo up
sysctl -qw net.ipv4.ip_forward=1

mkdir -p "$home/upper" "$home/work" "$root"
mount -t overlay -o "lowerdir=/,upperdir=$home/upper,workdir=$home/work" "$name" "$root"
mount -t proc proc "$root/proc"
mount -t sysfs sysfs "$root/sys"
mount --rbind /sys/fs/cgroup "$root/sys/fs/cgroup"
mount --rbind /dev "$root/dev"
mount -t tmpfs -o mode=755 run "$root/run"
# Directories with much data or with overlays of their own: straight on the host's disk.
for path in var/lib/containerd var/lib/kubelet var/lib/etcd var/local; do
    mkdir -p "$home/disk/$path" "$root/$path"
    mount --bind "$home/disk/$path" "$root/$path"
done
mkdir -p "$root/opt/kube/bin"
mount --bind "$programs" "$root/opt/kube/bin"
printf 'nameserver 127.0.0.1\n' >"$root/run/resolv.conf"
[ ! -e "$root/etc/resolv.conf" ] || mount --bind "$root/run/resolv.conf" "$root/etc/resolv.conf"

cd "$root"
pivot_root . .
umount -l .
cd /
# Volumes have to travel between containers and the kubelet in both directions.
mount --make-rshared /
mkdir -p /run/kube /run/lock /run/netns
: >/run/kube/machine-ready
exec tini -s -- sleep infinity
