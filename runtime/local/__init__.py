"""This machine: devices, ports, child processes, NATS and etcd that are started here."""
