// A heap as its kernels see it, and what they share with the host.
#pragma once

#include <cstdint>

#include "ffi/fault.h"
#include "ffi/layout.h"

namespace symmkv {

// --- the slab of a GPU: layout.h's, and after the halves what the fused exchange needs ----------

// A page is pushed in pieces, each with a data word that says it has come. How many is chosen per
// batch; the words are laid out for the most.
constexpr uint32_t kMaxPieces = 64;
constexpr uint64_t kMinPieceNbytes = 512;

// Up to so many bytes, of all ranks together, an exchange goes by packets that carry their flag.
constexpr uint64_t kMaxPacketedNbytes = 1 << 20;

// 8 bytes of a page and, with each half of them, a flag; see PacketFlags.
struct alignas(16) Packet {
  uint32_t data0, flag0, data1, flag1;
};
constexpr uint64_t kPacketDataNbytes = 8;

struct DeviceLayout {
  Geometry geometry;

  // Most pieces of a page.
  constexpr uint32_t MaxPieces() const {
    uint64_t largest = 0;
    for (uint32_t b = 0; b < geometry.num_buffers; ++b) {
      if (geometry.page_nbytes[b] > largest) largest = geometry.page_nbytes[b];
    }
    const uint64_t pieces = largest / kMinPieceNbytes;
    return pieces < 1 ? 1 : pieces > kMaxPieces ? kMaxPieces : static_cast<uint32_t>(pieces);
  }
  constexpr uint64_t SlotNbytes() const {
    uint64_t nbytes = 0;
    for (uint32_t b = 0; b < geometry.num_buffers; ++b) nbytes += geometry.page_nbytes[b];
    return nbytes;
  }
  // Data words: uint64 [halves][num_slots][MaxPieces], each written by its slot's writer alone.
  constexpr uint64_t DataWordsNbytes() const {
    return AlignUp(geometry.num_slots * MaxPieces() * sizeof(uint64_t), kLineNbytes);
  }
  constexpr uint64_t DataWordsOffset(uint64_t exchange) const {
    return geometry.SlabNbytes() + exchange % kNumHalves * DataWordsNbytes();
  }
  // Packets: a region that plain bytes never touch, which could look like a flag.
  constexpr uint64_t PacketsNbytes() const {
    return kMaxPacketedNbytes / kPacketDataNbytes * sizeof(Packet);
  }
  constexpr uint64_t PacketsOffset(uint64_t exchange) const {
    return geometry.SlabNbytes() + kNumHalves * DataWordsNbytes() +
           exchange % kNumHalves * PacketsNbytes();
  }
  constexpr uint64_t SlabNbytes() const { return PacketsOffset(0) + kNumHalves * PacketsNbytes(); }
};

// --- shared with the host -----------------------------------------------------------------------

enum HeapStatus : uint32_t { kOpen = 0, kPoisoned = 1, kGone = 2 };

// In device memory that is never freed, since a captured graph may be replayed after close.
struct alignas(kLineNbytes) HeapState {
  uint32_t status;  // HeapStatus; read first by every kernel
  uint32_t published_fingerprint;
  uint64_t epoch;            // exchanges done
  uint64_t published_epoch;  // exchange of the last publish
  uint64_t blocks_entered;   // blocks of all exchanges that have read the epoch
};

// In pinned host memory.
struct HostWords {
  // Written by the watcher thread, read now and then by kernels that wait.
  alignas(kLineNbytes) uint64_t died;  // bit r: rank r has died
  uint64_t closed;                     // bit r: rank r has closed its heap
  uint32_t abort;                      // a peer has poisoned the heap
  // Written once, by the kernel that poisons the heap; `failed` last.
  alignas(kLineNbytes) Fault fault;
  uint32_t failed;
};

// By value in every launch; nothing in it changes between map and close.
struct DeviceHeap {
  DeviceLayout layout;
  uint32_t rank;
  uint32_t num_blocks;  // of an exchange; the same on every rank
  uint64_t timeout_ns;
  HeapState* state;
  HostWords* host;
  char* slab[kMaxRanks];  // as this GPU maps them; slab[rank] is its own
};

// The operands of a call; everything but the capacities is in device memory.
struct DeviceBatch {
  const int32_t* page;          // [capacity] page of the dense buffer
  const int32_t* writer;        // [capacity]
  const int32_t* num_current;   // [1]
  const uint32_t* fingerprint;  // [1]
  int64_t capacity;
  int64_t num_dense_pages;
  char* dense[kMaxBuffers];
};

// A packet's two flags. Each half of a packet is stored as one, so each carries a flag; together
// they are the whole epoch, so no flag ever comes again: equal first flags mean epochs 2^32 apart,
// whose second flags differ. Neither zeroed memory nor an exchange two earlier matches.
constexpr uint32_t PacketFlag0(uint64_t epoch) { return static_cast<uint32_t>(epoch); }
constexpr uint32_t PacketFlag1(uint64_t epoch) {
  return static_cast<uint32_t>(epoch) + static_cast<uint32_t>(epoch >> 32);
}

// A fused exchange pushes where the three calls pull, so ranks that differ in it must notice.
constexpr uint32_t kFusedMark = 0x5eed0000;

}  // namespace symmkv
