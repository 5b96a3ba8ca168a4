"""Whether a node is fit for training: its processor, memory, disks, network, accelerators, and its peers."""
