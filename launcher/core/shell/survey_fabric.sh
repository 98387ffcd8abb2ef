#!/bin/sh
# Print NVIDIA's NVSwitches, the fabric state of every GPU, the state of the Fabric Manager service,
# the type of every GPU's IOMMU group, and the number of PCIe bridges that redirect peer access
# (ACS; only root can read it).

for each in /dev/nvidia-nvswitch[0-9]*; do [ ! -e "$each" ] || printf "switch %s\n" "$each"; done
nvidia-smi --query-gpu=fabric.state --format=csv,noheader 2>/dev/null | sed "s/^/state /"
printf "service %s\n" "$(systemctl is-active nvidia-fabricmanager 2>/dev/null)"
for each in /sys/bus/pci/drivers/nvidia/*/iommu_group/type; do
  [ ! -e "$each" ] || printf "iommu %s\n" "$(cat "$each")"
done
printf "acs %s\n" "$(lspci -vvv 2>/dev/null | grep -c "ACSCtl:.*ReqRedir+")"
exit 0
