"""A cluster on one machine: hosts that are namespaces, links as slow as asked for, kills of ranks and hosts."""

from shardcomm.cluster.cluster import Cluster
from shardcomm.cluster.hosts import refusal
from shardcomm.cluster.links import LinkBytes, link_bytes
from shardcomm.cluster.namespaces import NoHostsError
from shardcomm.cluster.on_host import OnHost
from shardcomm.cluster.steps import step

__all__ = ["Cluster", "LinkBytes", "NoHostsError", "OnHost", "link_bytes", "refusal", "step"]
