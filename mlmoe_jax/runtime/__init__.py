"""The platform: processes, devices, memory, storage, terminal; may use no other room."""
