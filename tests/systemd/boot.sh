#!/bin/bash
# Boots systemd as PID 1 of the namespaces that this script was started in (see container.py).
#
#   boot.sh FOLDER NAME BOOT_ID SHARED=/srv [OUTSIDE=INSIDE ...]        (what is outside can be read only)
#
# FOLDER/disk outlives the boot: its etc-elastic-agent, etc-systemd and var-lib are the machine's disk, and SHARED is
# one that it shares with others. All else is this machine's own file system, with what is written on top of it kept in
# memory until the machine goes down.
set -eu -o pipefail

folder=$1 name=$2 boot_id=$3 shared=${4%%=*}
shift 4

hostname "$name"
mkdir -p "$folder/root"
mount -t tmpfs tmpfs "$folder/root"
cd "$folder/root"
mkdir upper work system
mount -t overlay overlay -o lowerdir=/,upperdir=upper,workdir=work system
cd system

mount -t proc proc proc
mount --bind -o ro proc/sys proc/sys # the kernel's settings are the host's
mount -t sysfs -o ro sysfs sys
mount -t cgroup2 cgroup2 sys/fs/cgroup
mount -t tmpfs -o mode=755 tmpfs run
mount -t tmpfs -o mode=1777 tmpfs tmp
mount -t tmpfs -o mode=1777 tmpfs var/tmp
mount -t tmpfs -o mode=755 tmpfs var/log

# Another boot, as it would be after a reset: agents tell by this id that the machine was started anew.
echo "$boot_id" >run/boot-id
mount --bind run/boot-id proc/sys/kernel/random/boot_id

mount -t tmpfs -o mode=755 tmpfs dev
for device in null zero full random urandom tty; do
    touch "dev/$device"
    mount --bind "/dev/$device" "dev/$device"
done
mkdir dev/pts dev/shm
mount -t devpts -o newinstance,ptmxmode=666 devpts dev/pts
mount -t tmpfs -o mode=1777 tmpfs dev/shm
ln -s pts/ptmx dev/ptmx
ln -s /proc/self/fd dev/fd

disk=$folder/disk
mkdir -p etc/elastic-agent srv opt/elastic-agent
mount --bind "$disk/etc-elastic-agent" etc/elastic-agent
mount --bind "$disk/etc-systemd" etc/systemd/system
mount --bind "$shared" srv
mount --bind "$disk/var-lib" var/lib
mount --bind "$disk/machine-id" etc/machine-id
: >etc/fstab
echo "$name" >etc/hostname
cp "$disk/hosts" etc/hosts
cat "$disk/passwd" >>etc/passwd
cat "$disk/group" >>etc/group

for pair in "$@"; do
    if [ -d "${pair%%=*}" ]; then
        mkdir -p ".${pair#*=}"
    else
        mkdir -p "$(dirname ".${pair#*=}")"
        touch ".${pair#*=}"
    fi
    mount --bind -o ro "${pair%%=*}" ".${pair#*=}"
    # Python may be installed in a folder that only its owner may enter; the services' users must get through.
    parent=$(dirname ".${pair#*=}")
    while [ "$parent" != . ]; do
        chmod o+x "$parent"
        parent=$(dirname "$parent")
    done
done

mkdir .old
pivot_root . .old
umount -l /.old
rmdir /.old
exec env -i container=lab PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    setpriv --bounding-set=-sys_module,-sys_time,-sys_rawio,-syslog /lib/systemd/systemd --system --unit=multi-user.target --log-target=journal --show-status=no
