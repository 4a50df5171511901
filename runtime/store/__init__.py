"""The state that a cluster shares: instances, models and live config, in etcd or in memory."""
