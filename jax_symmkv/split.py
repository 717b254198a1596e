"""Who computes what: the page-aligned zigzag split of a batch, and a bound that follows."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]


def split(current_pages: IntArray, cp_size: int) -> tuple[IntArray, IntArray, IntArray]:
    """The only definition of the split: plans, token lists and caps follow from it.

    Args:
      current_pages: int64[B] current pages of each request.
      cp_size: ranks of the group.

    Returns:
      int64[slots] each: request, page in the request, and writer of every current page.
    """
    request, page = ragged(current_pages)
    # 2*cp_size blocks of `size` pages; the first `longer` of them have one more.
    size, longer = np.divmod(current_pages, 2 * cp_size)
    size, longer = size[request], longer[request]
    in_longer = longer * (size + 1)
    block = np.where(
        page < in_longer,
        page // (size + 1),
        longer + (page - in_longer) // np.maximum(size, 1),
    )
    # Back and forth over the ranks, since late pages attend to more; rotated by the request, so
    # that short requests spread over the ranks.
    zigzag = np.minimum(block, 2 * cp_size - 1 - block)
    return request, page, (zigzag + request) % cp_size


def tokens_in_page(extend_len: IntArray, page: IntArray, page_size: int) -> IntArray:
    """Tokens of a page of a request that computes `extend_len`: fewer in its last."""
    tokens: IntArray = np.minimum(extend_len - page * page_size, page_size)
    return tokens


def starts(counts: IntArray) -> IntArray:
    """The exclusive running sum."""
    return np.cumsum(counts) - counts


def ragged(counts: IntArray) -> tuple[IntArray, IntArray]:
    """Group, and index in its group, of every element of groups of the given sizes."""
    group = np.repeat(np.arange(counts.size), counts)
    return group, np.arange(group.size) - starts(counts)[group]


def rank_token_bound(
    max_extend_tokens: int, max_requests: int, page_size: int, cp_size: int
) -> int:
    """Upper bound on a rank's tokens in batches of so many tokens and requests, or fewer.

    A rank is at offset j = (rank - b) % cp_size of request b, of whose e tokens it has f_j(e). At
    any price per token, with gain_j = max over e of f_j(e) - price * e,

        sum f_j(e) = price * sum e + sum (f_j(e) - price * e)
                  <= price * max_extend_tokens + sum gain_j.

    For prices from 1/cp_size to 1, gain_j is found among the shortest requests that give the rank m
    whole pages, m = 0 … 4. Others gain no more: filling up a last page that is the rank's own never
    loses (price <= 1), nor does taking 2*cp_size pages off a request that keeps as many, since 2 of
    them were the rank's (price >= 1/cp_size). The least bound is at a price that is the slope
    between two of these points. Offset 0 has both ends of the range: its first page costs 1 a token,
    so that the bound is never above max_extend_tokens, and its next two 1/cp_size.
    """
    own = page_size * np.arange(5)[:, None]
    length = _shortest_lengths(page_size, cp_size)  # [m, j]
    # Prices as fractions num / den, since a float may round to below the bound.
    low, high = np.triu_indices(5, 1)
    num, den = np.broadcast_arrays(own[high] - own[low], length[high] - length[low])
    allowed = (num <= den) & (num * cp_size >= den)
    num, den = np.unique(np.stack([num[allowed], den[allowed]]), axis=1)
    # gain_j times den, [price, j]
    gain = np.max(own * den[:, None, None] - num[:, None, None] * length, axis=1)

    # From request to request the offset goes down by one: whole rounds, then a stretch of a round
    # that may start anywhere. Python's integers from here on: the products may not fit 64 bits.
    rounds, rest = divmod(max_requests, cp_size)
    stretch = (np.arange(cp_size)[:, None] + np.arange(rest)) % cp_size  # [start, request]
    in_rounds = rounds * gain.sum(axis=1).astype(object)[:, None]
    in_stretch = gain[:, stretch].sum(axis=2).astype(object)  # [price, start]
    num, den = num.astype(object)[:, None], den.astype(object)[:, None]
    bound = (num * max_extend_tokens + in_rounds + in_stretch) // den
    return int(bound.min(axis=0).max())


def _shortest_lengths(page_size: int, cp_size: int) -> IntArray:
    """[m, j]: tokens of the shortest request that gives the rank at offset j m whole pages."""
    pages = np.arange(1, 4 * cp_size + 1)
    # Between two lengths with equally many pages a rank's tokens change linearly: the ends say all.
    length = np.concatenate([(pages - 1) * page_size + 1, pages * page_size])
    request, page, writer = split(-(-length // page_size), cp_size)
    tokens = np.zeros((length.size, cp_size), np.int64)
    in_page = tokens_in_page(length[request], page, page_size)
    np.add.at(tokens, (request, (writer - request) % cp_size), in_page)
    enough = tokens >= page_size * np.arange(1, 5)[:, None, None]
    shortest = np.where(enough, length[:, None], length[-1]).min(axis=1)  # the last has 4 for each
    return np.concatenate([np.zeros((1, cp_size), np.int64), shortest])
