// The slabs of a group as one rank sees them: the mailbox barrier over them, and poisoning.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "ffi/layout.h"
#include "ffi/shm/segment.h"

namespace symmkv {

struct WaitLimits {
  uint64_t timeout_ms;
  // How long to poll before sleeping: long where every rank has a core, next to nothing elsewhere.
  uint64_t spin_us;
};

class Peers {
 public:
  // `slabs[rank]` is the own one.
  Peers(uint32_t rank, std::vector<Segment> slabs, WaitLimits limits);

  uint32_t rank() const { return rank_; }
  uint32_t cp_size() const { return static_cast<uint32_t>(slabs_.size()); }
  const Segment& slab(uint32_t rank) const { return slabs_[rank]; }
  SlabHeader* own() const { return slabs_[rank_].header(); }
  void UnlinkOwn() { slabs_[rank_].Unlink(); }
  void Abandon() {
    for (Segment& slab : slabs_) slab.Abandon();
  }

  // The mailbox barrier.
  //
  //   writer    rank s writes mailbox[s] of every slab, one 64-bit word, no one else does
  //   reader    rank d polls the mailboxes of its own slab until each has reached `epoch`
  //   ordering  the word is stored with release after everything that s published, and loaded with
  //             acquire before d reads it
  //   reuse     epochs only grow and no word is ever reset, so a late reader can't miss one
  //
  // A rank is at most one exchange ahead of its slowest peer: it passes `epoch` only after the
  // peer's word. So of two ranks whose plans differ at least one sees the other's word of just this
  // epoch. Returns nothing, or the cause; the group is poisoned with it then.
  std::optional<Cause> Barrier(uint64_t epoch, uint16_t fingerprint, Phase phase);

  // Records the cause in every slab, and wakes the ranks that sleep. Of several causes at a time
  // the first in the slab of rank 0 prevails on every rank.
  void Poison(Cause cause);
  // The first cause that was recorded for this rank.
  std::optional<Cause> Poisoned() const;

 private:
  enum class Sight { kWaiting, kArrived, kFailed };
  Sight Look(uint64_t epoch, uint16_t fingerprint, Phase phase, Cause* cause);
  Sight Spin(uint64_t epoch, uint16_t fingerprint, Phase phase, Cause* cause);
  Sight Sleep(uint64_t epoch, uint16_t fingerprint, Phase phase, Cause* cause);
  std::optional<Cause> FindLost(uint64_t epoch, Phase phase) const;
  uint64_t Missing(uint64_t epoch) const;

  const uint32_t rank_;
  std::vector<Segment> slabs_;
  const WaitLimits limits_;
};

}  // namespace symmkv
