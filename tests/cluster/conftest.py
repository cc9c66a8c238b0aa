"""Real emulated hosts where this machine can make them; a skip that says why where it cannot."""

import functools
import os
import sys

import pytest

from penstock.cluster import emulated_cluster
from penstock.cluster.building import require_tools
from penstock.errors import ClusterError


@functools.cache
def why_not() -> str:
    try:
        require_tools(sys.platform, os.geteuid())
        with emulated_cluster(hosts=1, rate="1gbit"):
            return ""
    except ClusterError as error:
        return str(error)


@pytest.fixture(autouse=True)
def _skip_without_namespaces(request):
    if request.node.get_closest_marker("root") and why_not():
        pytest.skip(why_not())
