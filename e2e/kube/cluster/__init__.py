"""A real Kubernetes on one machine: a control plane and three nodes in three zones."""
