"""One clear line for whatever this machine may lack, with tools and kernels that only pretend."""

import errno
import os

import pytest

from penstock.cluster.building import (
    ChooseCongestionControl,
    LimitRate,
    NewBridge,
    NewCable,
    NewNamespace,
    carry_out,
    require_tools,
    run_command,
    setup_steps,
)
from penstock.cluster.topology import plan_layout
from penstock.errors import ClusterError


def everything(tool):
    return f"/sbin/{tool}"


def all_but(missing):
    return lambda tool: None if tool == missing else everything(tool)


def failing_on(kind, error):
    """Return a kernel that does every step except those of one kind."""

    def act(step):
        if isinstance(step, kind):
            raise error

    return act


def build(act):
    carry_out(setup_steps(plan_layout(0, (10**9, 10**9))), act)


def test_root_on_linux_with_the_tools_is_enough():
    asked = []
    require_tools("linux", 0, lambda tool: asked.append(tool) or everything(tool))
    assert asked == ["nsenter", "unshare", "mount"]  # all were looked for, and nothing was raised


def test_other_systems_are_told_what_is_needed():
    with pytest.raises(ClusterError, match="are Linux network namespaces and this is darwin; run on Linux as root"):
        require_tools("darwin", 0, everything)


def test_a_user_without_root_is_told_to_use_sudo():
    with pytest.raises(ClusterError, match="need root to make network namespaces; run the same command with `sudo -E`"):
        require_tools("linux", 1000, everything)


@pytest.mark.parametrize(
    ("tool", "package"), [("nsenter", "util-linux"), ("unshare", "util-linux"), ("mount", "mount")]
)
def test_a_missing_tool_is_named_with_its_package(tool, package):
    with pytest.raises(ClusterError, match=f"need `{tool}`, which is not on PATH; `apt install {package}`"):
        require_tools("linux", 0, all_but(tool))


def test_without_pyroute2_the_package_is_named():
    with pytest.raises(ClusterError, match="need the package pyroute2, which is not installed; `pip install pyroute2`"):
        require_tools("linux", 0, everything, lambda package: None)


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        (NewNamespace, OSError(errno.EPERM, "mount rundir failed"), "start it with --privileged"),
        (NewNamespace, OSError(errno.EINVAL, "Invalid argument"), "needs a kernel with CONFIG_NET_NS"),
        (NewBridge, OSError(errno.EPERM, "Operation not permitted"), "needs CAP_SYS_ADMIN and CAP_NET_ADMIN"),
        (NewBridge, OSError(errno.EOPNOTSUPP, "Unknown device type"), "CONFIG_BRIDGE; try `modprobe bridge`"),
        (NewCable, OSError(errno.EOPNOTSUPP, "Unknown device type"), "CONFIG_VETH; try `modprobe veth`"),
        (
            LimitRate,
            OSError(errno.ENOENT, "Specified qdisc kind is unknown"),
            "CONFIG_NET_SCH_TBF; try `modprobe sch_tbf`, or --rate none",
        ),
    ],
)
def test_a_kernel_without_a_part_is_told_which_and_how_to_get_it(kind, error, message):
    with pytest.raises(ClusterError) as raised:
        build(failing_on(kind, error))
    assert f"failed: {error.strerror}" in str(raised.value)
    assert os.strerror(error.errno) in str(raised.value)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_kernel_without_cubic_keeps_its_own_tcp():
    done = []

    def act(step):
        done.append(type(step))
        failing_on(ChooseCongestionControl, OSError(errno.ENOENT, "no such algorithm"))(step)

    build(act)
    assert LimitRate in done[done.index(ChooseCongestionControl) :]  # the rest was made all the same


def test_a_command_that_hangs_is_named(monkeypatch):
    monkeypatch.setattr("penstock.cluster.building.COMMAND_TIMEOUT_SECONDS", 0.1)
    with pytest.raises(ClusterError, match=r"`sleep 5` did not end within 0\.1 s; try it"):
        run_command(("sleep", "5"))
