"""The packet filter of a pod: nothing leaves or enters but the connection to the proxy, in the agent phase.

Commands are in a network namespace of their own, with a loopback alone; this is about what else runs in the
pod. Invariant: a rule set is in force as a whole or not at all, and is read back before anybody relies on
it.
"""

from __future__ import annotations

import ipaddress
import subprocess

_TABLE = "legorl"
_NFT_S = 10


class FilterError(Exception):
    """The filter could not be set."""


def close(allowed: tuple[str, int] | None = None) -> None:
    """Drop everything but the loopback's own and, where given, traffic with one address and TCP port.

    Raises:
        FilterError: it is not in force.
    """
    output = ["type filter hook output priority 0; policy drop;", 'oifname "lo" accept;']
    incoming = ["type filter hook input priority 0; policy drop;", 'iifname "lo" accept;']
    if allowed is not None:
        host, port = allowed
        family = "ip6" if ipaddress.ip_address(host).version == 6 else "ip"
        output.append(f"{family} daddr {host} tcp dport {port} accept;")
        incoming.append(f"{family} saddr {host} tcp sport {port} accept;")
    rules = [
        f"table inet {_TABLE} {{ }}",
        f"delete table inet {_TABLE}",
        f"table inet {_TABLE} {{",
        f"chain out {{ {' '.join(output)} }}",
        f"chain in {{ {' '.join(incoming)} }}",
        "}",
    ]
    _nft("-f", "-", stdin="\n".join(rules) + "\n")
    if (found := _nft("list", "table", "inet", _TABLE)).count("policy drop") != 2:
        raise FilterError(f"the packet filter is not in force: {found}")


def _nft(*arguments: str, stdin: str = "") -> str:
    try:
        done = subprocess.run(
            ["nft", *arguments], input=stdin, capture_output=True, text=True, timeout=_NFT_S, check=False
        )
    except FileNotFoundError as error:
        raise FilterError("the guard's image has no nft") from error
    except subprocess.TimeoutExpired as error:
        raise FilterError(f"nft took longer than {_NFT_S} s") from error
    if done.returncode != 0:
        raise FilterError(f"nft {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout
