"""A recipe on a cluster: what is started, and every difference."""

from __future__ import annotations

from dataclasses import replace

import pytest

from launcher import containers
from launcher.errors import RequestError
from launcher.recipes.content import content
from launcher.recipes.serving import _OURS, Content, Serving, Wish, number, serving
from launcher.recipes.split import Sizes
from launcher.recipes.words import options
from launcher.site import Site
from tests.recipes import acme


def made(
    *args: str,
    env: dict[str, str] | None = None,
    wish: Wish | None = None,
    more: str = "",
    version: str = "",
    image: str = "",
    here: str | None = "0.32.0",
) -> Serving:
    """Serve a made-up recipe on two nodes."""
    said = Content(
        name="a/b",
        model="a/b",
        args=tuple((each, "base") for each in options(args)),
        env=env or {},
        split=Sizes(tp=16, nodes=2),
        split_name="multi_node_tp",
        takes="`--strategy multi_node_tp`",
        version=version,
        image=image,
    )
    return serving(said, acme.nodes(more=more), wish or Wish(), here)


def test_the_split_is_the_clusters_own() -> None:
    """Unless the recipe's, or another, is asked for; what differs is said."""
    own, theirs, asked = (
        made(wish=each) for each in (Wish(), Wish(strategy=True), Wish(strategy=True, pp=4))
    )

    assert (own.tp, own.pp, own.dp) == (None, None, None)
    assert (
        "the recipe's split (multi_node_tp) is TP 16 on 2 nodes; vlaunch takes its own"
        in (own.notes[0])
    )
    assert (theirs.tp, theirs.pp, theirs.dp) == (16, 1, 1)
    assert theirs.notes == ("the split is the recipe's multi_node_tp: TP 16 on 2 nodes",)
    assert (asked.tp, asked.pp, asked.dp) == (None, 4, None)
    assert asked.notes[0].startswith("the split is as asked")


def test_what_vlaunch_sets_itself() -> None:
    """Is left out of the recipe's arguments, each with what to use instead."""
    found = made("--tensor-parallel-size", "8", "--port=9", "--seed", "1")

    assert found.args == ("--seed", "1")
    assert (
        "`--tensor-parallel-size 8` (base) is left out; `--tensor-parallel-size`: use `--tp`"
        in (found.notes[1])
    )
    assert found.notes[2] == (
        "`--port=9` (base) is left out; `--port`: use `--port` of `vlaunch serve`, or `ports: {api:"
        " …}` in the inventory"
    )


def test_the_users_words_win() -> None:
    """In whatever spelling; what says the same is no difference."""
    wish = Wish(args=("--max_model_len=8", "--no-enable-x", "--seed", "1"))
    found = made("--max-model-len", "4", "--enable-x", "--seed", "1", wish=wish)

    assert found.args == wish.args
    assert found.notes[1:] == (
        "`--max_model_len=8`, as asked, in place of `--max-model-len 4` (base)",
        "`--no-enable-x`, as asked, in place of `--enable-x` (base)",
    )


@pytest.mark.parametrize(
    ("wish", "more", "kept"),
    [
        (Wish(), "", False),
        (Wish(), "serve: {dp: 2}", True),
        (Wish(dp=2), "", True),
        (Wish(tp=8), "serve: {dp: 2}", False),
    ],
)
def test_balancing_is_for_replicas(wish: Wish, more: str, kept: bool) -> None:
    """One replica needs none."""
    found = made("--data-parallel-hybrid-lb", wish=wish, more=more)

    assert (found.args == ("--data-parallel-hybrid-lb",)) is kept
    assert any("there is one replica" in each for each in found.notes) is not kept


def test_variables() -> None:
    """What vlaunch or the inventory sets stays as it is, and is named."""
    more = "env: {B: '2', C: '3'}"
    found = made(
        env={"A": "1", "B": "1", "C": "3", "VLLM_HOST_IP": "x", "HF_HOME": "/h"}, more=more
    )

    assert found.env == {"A": "1"}
    assert found.notes[1:] == (
        "VLLM_HOST_IP=x: vlaunch sets it by `ip:` of each node",
        "HF_HOME=/h: vlaunch sets it by `hf_home:` of the inventory",
        "B=2, as in the inventory, not the recipe's 1",
    )


def test_what_vlaunch_sets_is_known_here() -> None:
    """No variable of its containers could be another one's."""
    inventory = acme.nodes(more="network: {interface: eth0}")
    spec = containers.node_spec(Site(inventory), inventory.head, "i", {}, fingerprinted="x")
    known = {name for name in spec.env if any(each.fullmatch(name) for each, _ in _OURS)}

    assert set(spec.env) - known == set()


def test_a_deadline() -> None:
    """What a recipe lets vLLM wait for its engine is what a start may take."""
    found = made(env={"VLLM_ENGINE_READY_TIMEOUT_S": "7200"})

    assert (found.timeout, found.env) == (7200.0, {})


def test_placeholders_are_filled_in() -> None:
    """By the inventory: the interface, the head's address, the RDMA devices."""
    more = "network: {fabric: roce, interface: eth7, hca: [mlx5_0, mlx5_1]}"
    found = made(
        "--at", "$HEAD_IP:1", env={"A_IFNAME": "${IFACE_NAME}", "A_HCA": "$IB_IF"}, more=more
    )

    assert found.args == ("--at", "10.0.0.1:1")
    assert found.env == {"A_IFNAME": "eth7", "A_HCA": "mlx5_0,mlx5_1"}


@pytest.mark.parametrize(
    ("env", "more", "said", "hint"),
    [
        (
            {"A": "$IFACE_NAME"},
            "",
            "A has the placeholder $IFACE_NAME",
            "network: {interface: NAME}",
        ),
        ({"A": "$OTHER"}, "", "A has the placeholder $OTHER", "a variable under `env:`"),
        ({"HF_TOKEN": "x"}, "", "HF_TOKEN looks like a secret", "`secrets:`"),
        ({"A": "hf_abcdefghijklmnopqrstuvwx"}, "", "A looks like a secret", "`secrets:`"),
        (
            {"LD_PRELOAD": "/x.so", "OMP_NUM_THREADS": "1"},
            "",
            "LD_PRELOAD and OMP_NUM_THREADS can be handed to them; in the inventory:\nenv:\n"
            '  LD_PRELOAD: "/x.so"\n  OMP_NUM_THREADS: "1"',
            "`--backend mp`",
        ),
    ],
)
def test_variables_that_cannot_be_had(env: dict[str, str], more: str, said: str, hint: str) -> None:
    """Are refused, with the lines that would help."""
    with pytest.raises(RequestError) as error:
        made(env=env, more=more)

    assert said in error.value.evidence
    assert hint in error.value.hint


def test_each_node_has_an_interface_of_its_own() -> None:
    """Then the exact lines are named for each."""
    inventory = acme.nodes(more="network: {interface: eth0}")
    first, second = inventory.nodes
    other = replace(inventory, nodes=(first, replace(second, interface="eth1")))
    with pytest.raises(RequestError) as error:
        serving(Content(name="a", model="a/b", env={"A": "$IFACE_NAME"}), other, Wish(), None)

    assert "`env:` of n01 `A: eth0`, n02 `A: eth1`" in error.value.hint


@pytest.mark.parametrize(("backend", "more"), [("mp", ""), ("ray", "env: {LD_PRELOAD: /x.so}")])
def test_early_variables_that_can(backend: str, more: str) -> None:
    """Without Ray, or where the containers have them already."""
    wish = Wish(backend="mp" if backend == "mp" else "ray")
    found = made(env={"LD_PRELOAD": "/x.so"}, wish=wish, more=more)

    assert found.env == ({"LD_PRELOAD": "/x.so"} if backend == "mp" else {})


def test_everything_that_speaks_against_it_at_once() -> None:
    """One error, each with its hint."""
    with pytest.raises(RequestError, match="a/b cannot be served here") as error:
        made(env={"A": "$X", "LD_PRELOAD": "x"}, version="0.33")

    assert len([line for line in error.value.evidence.splitlines() if "  " not in line]) == 4
    assert "it needs vLLM 0.33, and vllm/vllm-openai:v0.32.0 has 0.32.0" in error.value.evidence


@pytest.mark.parametrize(
    ("needed", "here", "refused", "note"),
    [
        ("0.33.0", "0.32.0", True, ""),
        ("0.32.0", "0.32.0", False, ""),
        ("0.9.2", "0.32.0", False, ""),
        ("0.33.0", None, False, "it needs vLLM 0.33.0 or newer; what"),
        ("nightly", "0.32.0", False, "`nightly`, which is no version"),
        ("", "0.32.0", False, ""),
    ],
)
def test_versions(needed: str, here: str | None, refused: bool, note: str) -> None:
    """A newer vLLM than the image's is refused; what is not known is said."""
    if refused:
        with pytest.raises(RequestError):
            made(version=needed, here=here)
        return
    notes = made(version=needed, here=here).notes[1:]
    assert (len(notes) == 1 and note in notes[0]) if note else notes == ()


@pytest.mark.parametrize(
    ("image", "said"),
    [
        ("acme/x:1", True),
        ("vllm/vllm-openai:v0.32.0", False),
        ("acme/x:latest", False),
        ("", False),
    ],
)
def test_another_image(image: str, said: bool) -> None:
    """Is named, with what to write and to run."""
    notes = made(image=image).notes[1:]

    assert any(f"write `image: {image}`" in each for each in notes) is said


def test_numbers_of_versions() -> None:
    """They are compared as numbers."""
    assert number("v0.9.2") < number("0.10") < number("0.10.1rc1")
    assert number("nightly") == ()


@pytest.mark.parametrize(
    ("recipe", "on", "strategy", "nodes", "said"),
    [
        ("Sound", "h100", None, 2, "it is a recipe for vLLM-Omni"),
        ("Dense-8B", "mi300x", None, 2, "mi300x is AMD's, and the inventory says"),
        ("Experts-600B", "h100", "pd_cluster", 2, "is not what vlaunch starts"),
        ("Experts-600B", "h100", "multi_node_dep", 1, "is for several nodes, and there is one"),
    ],
)
def test_what_vlaunch_does_not_do(
    recipe: str, on: str, strategy: str | None, nodes: int, said: str
) -> None:
    """Is refused in words."""
    inventory = acme.nodes(nodes)
    found = content(acme.chosen(recipe, on, strategy), inventory, strategy=strategy is not None)
    with pytest.raises(RequestError) as error:
        serving(found, inventory, Wish(strategy=strategy is not None), None)

    assert said in error.value.evidence


def test_what_must_be_there_besides() -> None:
    """Image, versions and what is to be installed, as the recipe has them for this hardware."""
    found = content(
        acme.chosen("Own-Image-27B", "b200", variant="nvfp4"), acme.nodes(), strategy=False
    )

    assert (found.image, found.version) == ("acme/vllm:nv-130", "0.33.0")
    assert found.notes == (
        "nobody has confirmed this recipe on b200",
        "the recipe was written for a nightly build of vLLM",
        "the image must have what the recipe installs: uv pip install acme-kernels",
        "to be done on the nodes before: fetch acme",
    )
    own = content(acme.chosen("Own-Image-27B", "h100"), acme.nodes(1, 4), strategy=False)
    assert (own.image, own.version) == ("acme/vllm:own-image", "0.30.0")
    assert own.notes[0] == "the recipe's h100 is a node with 8 GPUs; these have 4"
