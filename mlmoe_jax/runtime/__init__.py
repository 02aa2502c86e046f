"""The platform: processes, devices, memory, storage, terminal; may use no other package."""
