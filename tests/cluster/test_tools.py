"""One clear line for whatever this machine may lack, with tools that only pretend."""

import pytest

from penstock.cluster.layout import plan_layout
from penstock.cluster.links import setup_steps
from penstock.cluster.tools import perform, require_tools, run_command
from penstock.errors import ClusterError


def everything(tool):
    return f"/sbin/{tool}"


def all_but(missing):
    return lambda tool: None if tool == missing else everything(tool)


def failing_on(words, complaint):
    """Return a runner that succeeds until a command or a line of its batch holds `words`."""

    def run(argv, stdin="", keep_open=()):
        return (1, "", complaint) if words in " ".join(argv) + stdin else (0, "", "")

    return run


def build(runner):
    for step in setup_steps(plan_layout(0, (10**9, 10**9))):
        perform(step, runner)


def test_root_on_linux_with_the_tools_is_enough():
    asked = []
    require_tools("linux", 0, lambda tool: asked.append(tool) or everything(tool))
    assert asked == ["ip", "tc", "unshare"]  # all were looked for, and nothing was raised


def test_other_systems_are_told_what_is_needed():
    with pytest.raises(ClusterError, match="are Linux network namespaces and this is darwin; run on Linux as root"):
        require_tools("darwin", 0, everything)


def test_a_user_without_root_is_told_to_use_sudo():
    with pytest.raises(ClusterError, match="need root to make network namespaces; run the same command with `sudo -E`"):
        require_tools("linux", 1000, everything)


@pytest.mark.parametrize(("tool", "package"), [("ip", "iproute2"), ("tc", "iproute2"), ("unshare", "util-linux")])
def test_a_missing_tool_is_named_with_its_package(tool, package):
    with pytest.raises(ClusterError, match=f"need `{tool}`, which is not on PATH; `apt install {package}`"):
        require_tools("linux", 0, all_but(tool))


@pytest.mark.parametrize(
    ("words", "complaint", "message"),
    [
        ("netns add", "mount --make-shared /run/netns failed: Operation not permitted", "start it with --privileged"),
        ("netns add", "Cannot create namespace file: Invalid argument", "needs a kernel with CONFIG_NET_NS"),
        ("type bridge", "RTNETLINK answers: Operation not permitted", "needs CAP_SYS_ADMIN and CAP_NET_ADMIN"),
        ("type bridge", "Error: Unknown device type.", "needs a kernel with CONFIG_BRIDGE; try `modprobe bridge`"),
        ("type veth", "Error: Unknown device type.", "needs a kernel with CONFIG_VETH; try `modprobe veth`"),
        (
            "tbf",
            "Error: Specified qdisc kind is unknown.",
            "CONFIG_NET_SCH_TBF; try `modprobe sch_tbf`, or --rate none",
        ),
    ],
)
def test_a_kernel_without_a_part_is_told_which_and_how_to_get_it(words, complaint, message):
    with pytest.raises(ClusterError) as error:
        build(failing_on(words, f"\n{complaint}\nCommand failed -:1\n"))
    assert complaint in str(error.value)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_kernel_without_cubic_keeps_its_own_tcp():
    done = []

    def run(argv, stdin="", keep_open=()):
        done.append(" ".join(argv))
        return failing_on("congctl", "Error: Invalid argument.")(argv, stdin, keep_open)

    build(run)
    first_refusal = next(index for index, command in enumerate(done) if "congctl" in command)
    assert any("tbf" in command for command in done[first_refusal:])  # the rest was made all the same


def test_a_command_that_hangs_is_named(monkeypatch):
    monkeypatch.setattr("penstock.cluster.tools.COMMAND_TIMEOUT_SECONDS", 0.1)
    with pytest.raises(ClusterError, match=r"`sleep 5` did not end within 0\.1 s; try it"):
        run_command(("sleep", "5"))
