"""Checkpoint policies as plain data: what one block keeps for its backward pass.

A `Policy` says, for the values inside one block, which are saved, which are
offloaded to host memory and which are recomputed. It is text and object at once:
``parse_policy(str(policy)) == policy``. No JAX here; `jaxckpt.remat` turns a
policy into one of JAX's own at the edge.
"""

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

Rule = Literal[
    "none",
    "everything_saveable",
    "nothing_saveable",
    "dots_saveable",
    "dots_with_no_batch_dims_saveable",
    "names",
]
RULES: tuple[str, ...] = get_args(Rule)

# Other spellings people know for the rules above.
ALIASES = {"full": "nothing_saveable", "minimal": "dots_with_no_batch_dims_saveable"}

_RULE_WITH_NAMES = (
    "{} takes no names: JAX has no policy that is both; list every value to keep "
    "instead, as in save:context,out_proj"
)
_FEW = 4  # names; a block with fewer leaves much of what it computes unnamed
_SEE_AUTOMATIC = "jaxckpt.list_names(block, *args, automatic=True) has all others"
_NAME = re.compile(r"[A-Za-z_][\w.\-]*")
_AUTOMATIC = re.compile(r"[a-z_][\w\-]*\.\d+")  # scatter-add.0
_OF_A_STACK = re.compile(
    r"((sqrt|(every|revolve):\s*\d+)\s*(/.*)?|\d+\s*x.*)", re.DOTALL
)


class PolicyError(ValueError):
    """A policy, value name or layer plan that cannot be what was meant. One line.

    Example:
      >>> try:
      ...     parse_policy("dots_savable")
      ... except PolicyError as error:
      ...     print(str(error).partition(" Known")[0])
      unknown policy 'dots_savable'. Did you mean 'dots_saveable'?
    """


def is_automatic(name: str) -> bool:
    """Whether a name is one that jaxckpt gives, a primitive and a number: ``tanh.0``.

    See `jaxckpt.automatic_names`.
    """
    return _AUTOMATIC.fullmatch(name) is not None


def nearest(word: str, known: Iterable[str]) -> str:
    """Returns ``" Did you mean 'x'?"`` for the closest known word, or nothing."""
    known = list(known)
    match = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    match = match or [name for name in known if word and name.startswith(word)]
    return f" Did you mean {match[0]!r}?" if match else ""


@dataclass(frozen=True)
class Policy:
    """What one checkpointed block keeps between forward and backward.

    Attributes:
      rule: ``"none"`` leaves the block un-checkpointed, ``"names"`` uses the two
        lists below, and the others are JAX's policies of the same name.
      save: names of values that stay in device memory (``"names"`` only).
      offload: names of values that move to host memory (``"names"`` only).
        A value in neither list is recomputed.

    Raises:
      PolicyError: an unknown rule, names together with a rule, a name in both
        lists, or no name at all.

    Example:
      >>> Policy(save=("context", "out_proj"))
      Policy('save:context,out_proj')
      >>> str(parse_policy("save:context/offload:mlpwi_0"))
      'save:context/offload:mlpwi_0'
    """

    rule: Rule = "names"
    save: tuple[str, ...] = ()
    offload: tuple[str, ...] = ()

    def __post_init__(self):
        if self.rule not in RULES:
            raise PolicyError(
                f"unknown policy rule {self.rule!r}; known: {', '.join(RULES)}"
            )
        if self.rule != "names" and (self.save or self.offload):
            raise PolicyError(_RULE_WITH_NAMES.format(self.rule))
        if self.rule == "names" and not (self.save or self.offload):
            raise PolicyError("no names to save or offload; did you mean 'full'?")
        for names in (self.save, self.offload):
            if isinstance(names, str):
                raise PolicyError(f"names are a tuple, ({names!r},), not text")
        for name in (*self.save, *self.offload):
            if not isinstance(name, str) or not _NAME.fullmatch(name):
                raise PolicyError(f"{name!r} is not a value name (letters, digits, _)")
        both = sorted(set(self.save) & set(self.offload))
        if both:
            raise PolicyError(f"{both[0]!r} is both saved and offloaded; choose one")
        object.__setattr__(self, "save", tuple(sorted(set(self.save))))
        object.__setattr__(self, "offload", tuple(sorted(set(self.offload))))

    @property
    def names(self) -> tuple[str, ...]:
        """Every value name that the policy speaks of."""
        return self.save + self.offload

    def __str__(self) -> str:
        if self.rule != "names":
            return self.rule
        parts = [("save", self.save), ("offload", self.offload)]
        return "/".join(f"{key}:{','.join(names)}" for key, names in parts if names)

    def __repr__(self) -> str:
        return f"Policy({str(self)!r})"


NONE = Policy("none")
FULL = Policy("nothing_saveable")


def parse_policy(policy: "str | Policy") -> Policy:
    """Reads one block's policy: ``dots_saveable``, ``save:a,b/offload:c``, ``full``.

    For text that also speaks of layers (``sqrt``, ``12xfull+4xnone``) use
    `jaxckpt.parse_layers`.

    Args:
      policy: the text, or a `Policy`, which is returned as it is.

    Raises:
      PolicyError: with the known forms and the nearest match.

    Example:
      >>> parse_policy("full") == parse_policy("nothing_saveable")
      True
      >>> parse_policy("dots_savable")
      Traceback (most recent call last):
      ...
      jaxckpt.policies.PolicyError: unknown policy 'dots_savable'. Did you mean
      'dots_saveable'? Known: ...
    """
    if isinstance(policy, Policy):
        return policy
    if not isinstance(policy, str):
        raise PolicyError(f"a policy is text or a Policy, not {policy!r}")
    text = policy.strip()
    if text in ALIASES or (text in RULES and text != "names"):
        return Policy(ALIASES.get(text, text))  # pyright: ignore[reportArgumentType]
    if _OF_A_STACK.fullmatch(text):
        raise PolicyError(
            f"{text!r} plans a stack of layers; one block takes a policy such as 'full'"
        )
    if ":" not in text:
        raise unknown_policy(text)
    lists: dict[str, tuple[str, ...]] = {}
    for part in text.split("/"):
        key, _, names = (piece.strip() for piece in part.partition(":"))
        if key in ALIASES or key in RULES:
            raise PolicyError(_RULE_WITH_NAMES.format(key))
        if key not in ("save", "offload"):
            raise unknown_policy(part.strip())
        if key in lists:
            raise PolicyError(f"{key}: is given twice in {text!r}")
        lists[key] = tuple(name.strip() for name in names.split(","))
        if "" in lists[key]:
            raise PolicyError(f"an empty name in {part.strip()!r}")
    return Policy(save=lists.get("save", ()), offload=lists.get("offload", ()))


def unknown_policy(text: str) -> PolicyError:
    """The error for text that is no policy, with what would be one."""
    known = [rule for rule in RULES if rule != "names"] + list(ALIASES)
    forms = known + ["save:NAME,...", "offload:NAME,...", "sqrt", "every:K"]
    forms.append("revolve:S")
    hint = nearest(text, known + ["sqrt", "every:", "revolve:", "save:", "offload:"])
    return PolicyError(
        f"unknown policy {text!r}.{hint} Known: {', '.join(forms)}, "
        "and layer plans such as 12xfull+4xnone"
    )


def unknown_names(names: Iterable[str], known: Iterable[str]) -> PolicyError:
    """The error for value names that no layer carries, with those that exist.

    Where few do, or an automatic one was asked for, it says how to see those.
    """
    names, known = sorted(names), sorted(known)
    given = [name for name in known if not is_automatic(name)]
    have = ", ".join(given) if given else "none (name values with checkpoint_name)"
    if len(given) < _FEW or any(map(is_automatic, names)):
        have += f"; {_SEE_AUTOMATIC}"
    return PolicyError(
        f"no value is named {', '.join(map(repr, names))} in this block."
        f"{nearest(names[0], known)} Known names: {have}"
    )
