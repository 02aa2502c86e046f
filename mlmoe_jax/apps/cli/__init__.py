"""The command line: flags, one function per mode, printing, exit codes."""
