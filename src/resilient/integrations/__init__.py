"""Other libraries' interfaces, served by this one."""
