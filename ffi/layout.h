// The slab of a rank: one description of header, mailboxes and halves, for CPU and CUDA.
//
//   0      header: identity, epoch, wake-up words, abort record
//   4096   mailboxes: one line per source rank, written by that rank alone
//   12288  half 0: buffer 0 [num_slots][page_nbytes], buffer 1 [...], ...
//          half 1: the same
//
// Slot i of a buffer lies at the same offset in every rank's slab, so a page is addressed by
// (writer, exchange, buffer, slot) with no per-batch handshake.
#pragma once

#include <cstddef>
#include <cstdint>

namespace symmkv {

constexpr uint64_t kMagic = 0x0031766b6d6d7973;  // "symmkv1"
constexpr uint32_t kLayoutVersion = 1;
constexpr uint32_t kMaxRanks = 64;
constexpr uint32_t kMaxBuffers = 8;
// Two cache lines: the adjacent-line prefetcher of x86 pulls them in pairs, NVLink moves 128 bytes.
constexpr size_t kLineNbytes = 128;
constexpr size_t kPageGranuleNbytes = 16;

// Two halves let an exchange begin while a peer still reads the one before (docs/protocol.md). One
// half is wrong; it exists so that a test can show that it would notice.
#ifndef SYMMKV_NUM_HALVES
#define SYMMKV_NUM_HALVES 2
#endif
constexpr uint64_t kNumHalves = SYMMKV_NUM_HALVES;

// The operation that a rank is in, or that failed.
enum class Phase : uint32_t { kIdle = 0, kPublish, kBarrier, kGather, kExchange, kTicket };

enum class CauseCode : uint32_t { kNone = 0, kTimeout, kDied, kClosed, kDisagree, kFailed };

// Why a heap is poisoned. Plain data, because it crosses processes.
struct Cause {
  CauseCode code;
  Phase phase;
  uint32_t rank;  // the rank it is about
  uint32_t unused;
  uint64_t epoch;       // number of the exchange, counted from 1
  uint64_t missing;     // bit r: rank r had not arrived
  uint64_t timeout_ms;  // of a kTimeout
  char detail[216];     // of a kFailed or kDisagree: text, NUL-terminated
};

// How far an abort record is written: first writer wins, readers wait for kWritten.
enum AbortState : uint32_t { kClear = 0, kWriting = 1, kWritten = 2 };

struct alignas(kLineNbytes) SlabHeader {
  uint64_t magic;
  uint32_t layout_version;
  uint32_t rank;
  uint64_t nonce;
  uint32_t closed;  // set by the owner, before it lets go

  // Exchanges done, and what the owner is doing. Written by the owner alone.
  alignas(kLineNbytes) uint64_t epoch;
  uint64_t published_epoch;  // exchange of the last publish
  uint32_t published_fingerprint;
  Phase phase;

  // Peers bump `wake` after they have written a mailbox, if the owner says that it sleeps.
  alignas(kLineNbytes) uint32_t wake;
  uint32_t sleeping;

  // Written once, by whichever rank poisons first.
  alignas(kLineNbytes) uint32_t abort_state;
  Cause cause;
};

// Written by one source rank alone; read by the slab's owner.
struct alignas(kLineNbytes) Mailbox {
  uint64_t arrive;    // ArriveWord of the source's latest barrier
  uint64_t greeting;  // the owner's nonce, written back when the source has mapped this slab
};

constexpr size_t kMailboxesOffset = 4096;
constexpr size_t kHalvesOffset = kMailboxesOffset + kMaxRanks * sizeof(Mailbox);

static_assert(sizeof(Cause) == 256 && offsetof(Cause, detail) == 40);
static_assert(offsetof(SlabHeader, epoch) == 128 && offsetof(SlabHeader, wake) == 256);
static_assert(offsetof(SlabHeader, abort_state) == 384 && sizeof(SlabHeader) <= kMailboxesOffset);
static_assert(sizeof(Mailbox) == kLineNbytes && kHalvesOffset == 12288);

// An arrive word carries the epoch in its upper 48 bits, which last for years, and below it the
// plan's fingerprint, so that ranks that disagree on the batch notice before they read each other's
// pages.
constexpr uint64_t ArriveWord(uint64_t epoch, uint16_t fingerprint) {
  return epoch << 16 | fingerprint;
}
constexpr uint64_t EpochOf(uint64_t arrive_word) { return arrive_word >> 16; }
constexpr uint16_t FingerprintOf(uint64_t arrive_word) {
  return static_cast<uint16_t>(arrive_word & 0xffff);
}
// 0 says "a barrier without a plan", so no plan folds to it.
constexpr uint16_t FoldFingerprint(uint32_t fingerprint) {
  const auto folded = static_cast<uint16_t>(fingerprint ^ fingerprint >> 16);
  return folded == 0 ? uint16_t{1} : folded;
}

constexpr uint64_t AlignUp(uint64_t value, uint64_t alignment) {
  return (value + alignment - 1) / alignment * alignment;
}

// What the ranks of a group agree on; every offset into a half is computed here.
struct Geometry {
  uint32_t cp_size;
  uint32_t num_buffers;
  uint64_t num_slots;
  uint64_t page_nbytes[kMaxBuffers];

  constexpr uint64_t BufferOffset(uint32_t buffer) const {
    uint64_t offset = 0;
    for (uint32_t b = 0; b < buffer; ++b)
      offset += AlignUp(num_slots * page_nbytes[b], kLineNbytes);
    return offset;
  }
  constexpr uint64_t HalfNbytes() const { return BufferOffset(num_buffers); }
  constexpr uint64_t SlabNbytes() const { return kHalvesOffset + kNumHalves * HalfNbytes(); }
  constexpr uint64_t SlotOffset(uint64_t exchange, uint32_t buffer, uint64_t slot) const {
    return kHalvesOffset + (exchange % kNumHalves) * HalfNbytes() + BufferOffset(buffer) +
           slot * page_nbytes[buffer];
  }
};

}  // namespace symmkv
