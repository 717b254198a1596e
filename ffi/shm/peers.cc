#include "ffi/shm/peers.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <climits>
#include <utility>

#include "ffi/cause.h"
#include "ffi/fault.h"

namespace symmkv {
namespace {

// Between two looks at who is still alive; bounds how late a death is noticed.
constexpr uint64_t kSleepSliceUs = 50'000;
// How long another rank may take to write an abort record, preempted in the middle.
constexpr uint64_t kRecordUs = 100'000;
// Polls between two looks at the clock and the abort record.
constexpr int kPollsPerClock = 64;

uint64_t NowUs() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1'000'000 + static_cast<uint64_t>(now.tv_nsec) / 1000;
}

void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

void FutexWait(uint32_t* word, uint32_t expected, uint64_t timeout_us) {
  const timespec timeout{static_cast<time_t>(timeout_us / 1'000'000),
                         static_cast<long>(timeout_us % 1'000'000 * 1000)};
  // Not FUTEX_PRIVATE: the waker is another process. Every return, spurious or not, is a new look.
  syscall(SYS_futex, word, FUTEX_WAIT, expected, &timeout, nullptr, 0);
}

void WakeOwner(SlabHeader* header) {
  // Release: whoever sees the new count also sees what was written before it.
  __atomic_fetch_add(&header->wake, 1, __ATOMIC_RELEASE);
  syscall(SYS_futex, &header->wake, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

// The cause in an abort record, once it is written. Should its writer die before, its death is the
// cause that the next barrier finds.
std::optional<Cause> Record(const SlabHeader& header) {
  // Acquire: pairs with the release of kWritten.
  if (__atomic_load_n(&header.abort_state, __ATOMIC_ACQUIRE) != kWritten) return std::nullopt;
  return header.cause;
}

// The same for a record that somebody writes just now; not forever, since the writer may have died.
std::optional<Cause> AwaitRecord(const SlabHeader& header) {
  const uint64_t until_us = NowUs() + kRecordUs;
  std::optional<Cause> cause;
  while (!(cause = Record(header)) && NowUs() < until_us) sched_yield();
  return cause;
}

}  // namespace

Peers::Peers(uint32_t rank, std::vector<Segment> slabs, WaitLimits limits)
    : rank_(rank), slabs_(std::move(slabs)), limits_(limits) {}

std::optional<Cause> Peers::Barrier(uint64_t epoch, uint16_t fingerprint, Phase phase) {
  for (uint32_t step = 0; step < cp_size(); ++step) {
    const Segment& peer = slabs_[(rank_ + step) % cp_size()];
    // Release: a peer that sees this word sees the pages published before it.
    __atomic_store_n(&peer.mailbox(rank_)->arrive, ArriveWord(epoch, fingerprint),
                     __ATOMIC_RELEASE);
  }
  // Orders the stores above before the loads below, as Sleep orders its store before its look:
  // either the peer sees the word, or this rank sees that the peer sleeps.
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
  for (const Segment& peer : slabs_) {
    if (__atomic_load_n(&peer.header()->sleeping, __ATOMIC_RELAXED)) WakeOwner(peer.header());
  }

  Cause cause{};
  Sight sight = Spin(epoch, fingerprint, phase, &cause);
  if (sight == Sight::kWaiting) sight = Sleep(epoch, fingerprint, phase, &cause);
  if (sight == Sight::kArrived) return std::nullopt;
  Poison(cause);
  return Poisoned().value_or(cause);  // a peer's cause may have come first
}

// One pass over the mailboxes.
Peers::Sight Peers::Look(uint64_t epoch, uint16_t fingerprint, Phase phase, Cause* cause) {
  Sight sight = Sight::kArrived;
  for (uint32_t source = 0; source < cp_size(); ++source) {
    // Acquire: pairs with the release in the source's Barrier.
    const uint64_t word = __atomic_load_n(&slabs_[rank_].mailbox(source)->arrive, __ATOMIC_ACQUIRE);
    if (EpochOf(word) < epoch) {
      sight = Sight::kWaiting;
    } else if (EpochOf(word) == epoch && FingerprintOf(word) != fingerprint) {
      Fault fault = MakeFault(FaultCode::kDisagree, phase, source, epoch);
      fault.value = FingerprintOf(word);
      fault.bound = fingerprint;
      *cause = MakeCause(fault, 0);
      return Sight::kFailed;
    }
  }
  return sight;
}

Peers::Sight Peers::Spin(uint64_t epoch, uint16_t fingerprint, Phase phase, Cause* cause) {
  const uint64_t until_us = NowUs() + limits_.spin_us;
  do {
    for (int poll = 0; poll < kPollsPerClock; ++poll) {
      const Sight sight = Look(epoch, fingerprint, phase, cause);
      if (sight != Sight::kWaiting) return sight;
      Pause();
    }
    if (auto poisoned = Poisoned()) {
      *cause = *poisoned;
      return Sight::kFailed;
    }
  } while (NowUs() < until_us);
  return Sight::kWaiting;
}

Peers::Sight Peers::Sleep(uint64_t epoch, uint16_t fingerprint, Phase phase, Cause* cause) {
  const uint64_t deadline_us = NowUs() + limits_.timeout_ms * 1000;
  SlabHeader* const own = this->own();
  Sight sight = Sight::kWaiting;
  // Sequentially consistent: see the fence in Barrier.
  __atomic_store_n(&own->sleeping, 1, __ATOMIC_SEQ_CST);
  for (;;) {
    // Acquire: a wake-up between this load and the wait changes the word, and the wait returns at
    // once.
    const uint32_t seen = __atomic_load_n(&own->wake, __ATOMIC_ACQUIRE);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    sight = Look(epoch, fingerprint, phase, cause);
    if (sight != Sight::kWaiting) break;
    std::optional<Cause> lost = Poisoned();
    if (!lost) lost = FindLost(epoch, phase);
    const uint64_t now_us = NowUs();
    if (!lost && now_us >= deadline_us) {
      const uint64_t missing = Missing(epoch);
      if (missing == 0) continue;  // arrived since the look
      lost = MakeCause(CauseCode::kTimeout, phase, static_cast<uint32_t>(__builtin_ctzll(missing)),
                       epoch, "");
      lost->missing = missing;
      lost->timeout_ms = limits_.timeout_ms;
    }
    if (lost) {
      *cause = *lost;
      sight = Sight::kFailed;
      break;
    }
    const uint64_t left_us = deadline_us - now_us;
    FutexWait(&own->wake, seen, left_us < kSleepSliceUs ? left_us : kSleepSliceUs);
  }
  __atomic_store_n(&own->sleeping, 0, __ATOMIC_RELAXED);
  return sight;
}

// A missing rank that will never come.
std::optional<Cause> Peers::FindLost(uint64_t epoch, Phase phase) const {
  for (uint32_t source = 0; source < cp_size(); ++source) {
    const Segment& peer = slabs_[source];
    if (source == rank_ || (Missing(epoch) >> source & 1) == 0) continue;
    // Acquire: what the source wrote before it closed is visible to the second look.
    const bool closed = __atomic_load_n(&peer.header()->closed, __ATOMIC_ACQUIRE) != 0;
    if (!closed && peer.OwnerAlive()) continue;
    // It may have arrived, then closed or died, since the first look.
    const uint64_t missing = Missing(epoch);
    if ((missing >> source & 1) == 0) continue;
    Cause cause =
        MakeCause(closed ? CauseCode::kClosed : CauseCode::kDied, phase, source, epoch, "");
    cause.missing = missing;
    return cause;
  }
  return std::nullopt;
}

uint64_t Peers::Missing(uint64_t epoch) const {
  uint64_t missing = 0;
  for (uint32_t source = 0; source < cp_size(); ++source) {
    const uint64_t word = __atomic_load_n(&slabs_[rank_].mailbox(source)->arrive, __ATOMIC_ACQUIRE);
    if (EpochOf(word) < epoch) missing |= uint64_t{1} << source;
  }
  return missing;
}

void Peers::Poison(Cause cause) {
  // In the order of ranks, everywhere: whoever comes second to the first slab carries on the cause
  // that it finds there, so all slabs get the same.
  for (const Segment& slab : slabs_) {
    SlabHeader* const header = slab.header();
    uint32_t clear = kClear;
    // Relaxed: the exchange only elects the writer; kWritten publishes the record.
    if (__atomic_compare_exchange_n(&header->abort_state, &clear, kWriting, false, __ATOMIC_RELAXED,
                                    __ATOMIC_RELAXED)) {
      header->cause = cause;
      __atomic_store_n(&header->abort_state, kWritten, __ATOMIC_RELEASE);
    } else {
      cause = AwaitRecord(*header).value_or(cause);
    }
    WakeOwner(header);
  }
}

std::optional<Cause> Peers::Poisoned() const { return Record(*own()); }

}  // namespace symmkv
