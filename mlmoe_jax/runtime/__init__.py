"""What the program runs on: processes, devices, memory, storage, terminal."""
