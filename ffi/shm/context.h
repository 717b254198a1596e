// One rank's end of a heap over shared memory: publish, barrier, gather and exchange.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "ffi/fault.h"
#include "ffi/layout.h"
#include "ffi/shm/peers.h"
#include "ffi/shm/segment.h"

namespace symmkv {

// The operands of a call that describe its batch; lengths as XLA gives them.
struct Batch {
  const int32_t* page;    // [capacity] page of the dense buffer
  const int32_t* writer;  // [capacity]
  int64_t capacity;
  int32_t num_current;
  uint32_t fingerprint;
};

// One dense buffer of a call.
struct Dense {
  char* data;
  uint64_t nbytes;
};

class ShmContext {
 public:
  // Why a call failed, in words; nothing when it succeeded.
  using Failure = std::optional<std::string>;

  // Creates this rank's segment. Throws std::runtime_error, as do Map and VerifyGreetings.
  ShmContext(const Geometry& geometry, uint32_t rank, uint64_t nonce, uint64_t first_epoch,
             WaitLimits limits);

  // --- agreement by doing, in this order, the ranks in step (jax_symmkv/heap.py) ---
  // What peers need to map it: the name of its segment.
  const std::string& address() const;
  uint64_t nbytes() const { return geometry_.SlabNbytes(); }
  // Maps every peer's slab, checks its nonce through the mapping and writes it back.
  void Map(const std::vector<std::string>& addresses, const std::vector<uint64_t>& nonces);
  // Every peer has written this rank's nonce back.
  void VerifyGreetings() const;
  void Unlink();

  // --- calls; serialised, since a heap's calls of one device have one order ---
  Failure Publish(const Batch& batch, const std::vector<Dense>& dense);
  Failure Barrier();
  Failure Gather(const Batch& batch, const std::vector<Dense>& dense);
  // The three in one call.
  Failure Exchange(const Batch& batch, const std::vector<Dense>& dense);
  // The program's guard; `axis_index` is -1 in a process-local program.
  Failure Guard(int32_t axis_index);
  // A call that could not even be started (an operand of the wrong kind): peers learn of it.
  Failure Refuse(Phase phase, const std::string& detail);

  // Waits for the call in progress and tells the peers. Idempotent, as Close is.
  void Leave();
  // Leaves, and lets go of the memory; the peers may go on reading it.
  void Close();
  // In a forked child: lets go without a word to the peers, who still have the parent. Takes no
  // lock, since the thread that holds it may not exist here.
  void Abandon();

  std::optional<Cause> Poisoned() const;
  const Geometry& geometry() const { return geometry_; }
  uint32_t rank() const { return rank_; }
  uint64_t epoch() const;
  // Nothing, or how an arrive word differs from the epoch. Exact when no exchange is in flight: a
  // peer may be one ahead while it waits for this rank.
  Failure Undrained() const;

 private:
  class Call;
  Failure Check(Phase phase, const Batch& batch, const std::vector<Dense>& dense);
  Failure PublishPages(Phase phase, const Batch& batch, const std::vector<Dense>& dense);
  Failure Meet(Phase phase);
  void GatherPages(const Batch& batch, const std::vector<Dense>& dense);
  // What this rank gathers in an exchange of the batch.
  uint64_t GatheredNbytes(const Batch& batch) const;
  Failure Fail(Phase phase, const std::string& detail);
  Failure Fail(Phase phase, FaultCode code, int32_t slot = 0, int64_t value = 0, int64_t bound = 0);
  // Closed, or poisoned: what every call looks at first.
  Failure Unusable() const;
  Failure Explain(const std::optional<Cause>& cause) const;

  const Geometry geometry_;
  const uint32_t rank_;
  const WaitLimits limits_;
  mutable std::mutex mutex_;
  Segment created_;               // until Map hands it to peers_
  std::unique_ptr<Peers> peers_;  // null before Map and after Leave
};

}  // namespace symmkv
