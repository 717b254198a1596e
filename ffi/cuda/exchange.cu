// The fused exchange: publish, barrier and gather in one launch, by push.
//
//   enter  Every block reads the epoch e-1, and counts itself; the last to do so advances the
//   epoch,
//          since from then on nobody needs the old one. Block 0 raises the arrive word of e at
//          every peer: this rank's exchange e-1 has ended, so the peer may write what e-1 and
//          before used.
//   small  Words of 8 bytes travel in packets that carry their flag; no other signal.
//   large  Warps of the first half of each block push pieces of the own pages into the peers'
//          staging, each followed by its data word (half, slot, piece); warps of the second half
//          wait for the words of the peers' pieces and drain them into the dense buffer.
//   leave  Block 0 has seen every peer's arrive word of e. So the next exchange of this rank, e+1,
//          comes after every peer entered e, hence ended e-1: its half, that of e-1, is free at
//          every peer.
//
// Progress: a piece is pushed by the block of the same number that drains it. Within a window of
// the plan pushing never waits, and a block goes on to its next window when it has drained the one
// before. So of the blocks that haven't finished anywhere, the lowest in the earliest window can go
// on, however few blocks are resident.
#include <algorithm>

#include "ffi/cuda/batch.cuh"
#include "ffi/cuda/kernels.h"
#include "ffi/cuda/meet.cuh"

namespace symmkv {
namespace {

constexpr uint32_t kThreads = 1024;
constexpr uint32_t kWarps = kThreads / 32;
constexpr uint32_t kPushWarps = kWarps / 2;
// More in one piece would delay its drain, less cost more signals.
constexpr uint64_t kPieceNbytes = 9216;
constexpr uint32_t kMaxGrid = 64;

__device__ inline Turn Enter(const DeviceHeap& heap, const DeviceBatch& batch) {
  __shared__ Turn turn;
  if (threadIdx.x == 0) {
    turn = ReadTurn(heap, batch);
    CheckCount(heap, batch, Phase::kExchange, &turn);
    if (turn.status == kOpen) {
      // The count goes on from exchange to exchange. Fence: the epoch was read before.
      __threadfence();
      const auto entered =
          atomicAdd(reinterpret_cast<unsigned long long*>(&heap.state->blocks_entered), 1ull);
      if ((entered + 1) % gridDim.x == 0) heap.state->epoch = turn.epoch + 1;
    }
  }
  __syncthreads();
  return turn;
}

// --- small ---------------------------------------------------------------------------------------

// 8 bytes of the batch: word `index` of all its slots.
struct Word {
  Slot slot;
  uint32_t buffer;
  uint32_t offset;  // in its page, bytes
};

__device__ inline Word Locate(const DeviceHeap& heap, const DeviceBatch& batch, const Turn& turn,
                              uint32_t index) {
  const Geometry& geometry = heap.layout.geometry;
  const uint32_t words = static_cast<uint32_t>(heap.layout.SlotNbytes() / kPacketDataNbytes);
  const int32_t slot = static_cast<int32_t>(index / words);
  uint32_t offset = index % words * kPacketDataNbytes;
  uint32_t buffer = 0;
  while (offset >= geometry.page_nbytes[buffer]) offset -= geometry.page_nbytes[buffer++];
  return Word{ReadSlot(heap, batch, Phase::kExchange, turn.epoch, slot), buffer, offset};
}

__device__ inline void ExchangePackets(const DeviceHeap& heap, const DeviceBatch& batch,
                                       const Turn& turn) {
  const uint64_t exchange = turn.epoch + 1;
  const uint32_t cp_size = heap.layout.geometry.cp_size;
  const uint32_t count =
      static_cast<uint32_t>(turn.num_current * heap.layout.SlotNbytes() / kPacketDataNbytes);
  const uint64_t region = heap.layout.PacketsOffset(exchange);
  const uint32_t flag0 = PacketFlag0(exchange), flag1 = PacketFlag1(exchange);
  // Neighbouring words to the lanes of a warp, neighbouring warps to different blocks.
  const uint32_t warp = threadIdx.x / 32 * gridDim.x + blockIdx.x;
  const uint32_t stride = gridDim.x * kThreads;
  for (uint32_t i = warp * 32 + threadIdx.x % 32; i < count; i += stride) {
    const Word word = Locate(heap, batch, turn, i);
    if (word.slot.writer != static_cast<int32_t>(heap.rank)) continue;
    const char* const page = DensePage(heap, batch, word.buffer, word.slot.page);
    const uint2 data = __ldcg(reinterpret_cast<const uint2*>(page + word.offset));
    const Packet packet{data.x, flag0, data.y, flag1};
    for (uint32_t step = 1; step < cp_size; ++step) {
      const uint32_t peer = (heap.rank + step) % cp_size;
      StorePacket(reinterpret_cast<Packet*>(heap.slab[peer] + region) + i, packet);
    }
  }
  bool alive = true;
  // Whole warps, to wait together.
  for (uint32_t first = warp * 32; first < count; first += stride) {
    const uint32_t i = first + threadIdx.x % 32;
    Word word{Slot{0, -1}, 0, 0};
    if (i < count) word = Locate(heap, batch, turn, i);
    const bool theirs =
        word.slot.writer >= 0 && word.slot.writer != static_cast<int32_t>(heap.rank);
    const Packet* const from = reinterpret_cast<const Packet*>(heap.slab[heap.rank] + region) + i;
    Packet packet{~0u, 0, ~0u, 0};
    if (alive) {
      alive = WaitAll(heap, theirs ? word.slot.writer : heap.rank, exchange, Phase::kExchange, [&] {
        if (!theirs) return true;
        packet = LoadPacket(from);
        return packet.flag0 == flag0 && packet.flag1 == flag1;
      });
    }
    if (!theirs) continue;
    const bool here = packet.flag0 == flag0 && packet.flag1 == flag1;
    char* const page = DensePage(heap, batch, word.buffer, word.slot.page);
    *reinterpret_cast<uint2*>(page + word.offset) =
        here ? make_uint2(packet.data0, packet.data1) : make_uint2(~0u, ~0u);
  }
}

// --- large ---------------------------------------------------------------------------------------

// Into how many pieces each page is cut: the same on every rank, as the count of pages is.
__device__ inline uint32_t Pieces(const DeviceHeap& heap, int32_t num_current) {
  const uint32_t cp_size = heap.layout.geometry.cp_size;
  const uint64_t own_pages = (static_cast<uint64_t>(num_current) + cp_size - 1) / cp_size;
  const uint64_t warps = static_cast<uint64_t>(heap.num_blocks) * kPushWarps;
  // Rounds of all warps, and as many pieces as fill them.
  const uint64_t round_nbytes = warps * kPieceNbytes;
  const uint64_t rounds = (own_pages * heap.layout.SlotNbytes() + round_nbytes - 1) / round_nbytes;
  const uint64_t pieces = rounds * warps / own_pages;
  const uint32_t most = min(heap.layout.MaxPieces(), heap.num_blocks);
  return pieces < 1 ? 1 : pieces > most ? most : static_cast<uint32_t>(pieces);
}

// Piece `piece` of a slot: that part of its page in every buffer. visit(buffer, offset in the page,
// nbytes)
template <class Visit>
__device__ inline void ForEachPart(const Geometry& geometry, uint32_t pieces, uint32_t piece,
                                   Visit visit) {
  for (uint32_t b = 0; b < geometry.num_buffers; ++b) {
    const uint64_t page_nbytes = geometry.page_nbytes[b];
    const uint64_t stripe = AlignUp((page_nbytes + pieces - 1) / pieces, kPageGranuleNbytes);
    const uint64_t offset = piece * stripe;
    if (offset < page_nbytes) visit(b, offset, min(stripe, page_nbytes - offset));
  }
}

// A piece that this block pushes or drains.
struct Task {
  int32_t page;
  uint16_t window_slot;  // slot, less the window's first
  uint8_t piece;
  uint8_t writer;
};

// The plan is looked through in windows of a slot a thread.
constexpr uint32_t kWindow = kThreads;

struct Tasks {
  uint32_t num_pushes, num_drains;
  Task pushes_then_drains[kWindow];  // the drains from the end on
  uint32_t of_writer[kMaxRanks];     // slots of each writer in earlier windows
  uint16_t in_warp[kWarps][kMaxRanks];
};

// Lists this block's pieces of the window. Piece q of the k-th slot of a writer falls to block
// (k * pieces + q) mod grid, which spreads each writer's pieces evenly; at most one piece of a
// slot, since there are no more pieces than blocks.
__device__ inline void ListTasks(const DeviceHeap& heap, const DeviceBatch& batch, const Turn& turn,
                                 uint32_t pieces, int32_t window, Tasks* tasks) {
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (uint32_t i = threadIdx.x; i < kWarps * kMaxRanks; i += kThreads)
    (&tasks->in_warp[0][0])[i] = 0;
  if (threadIdx.x == 0) tasks->num_pushes = tasks->num_drains = 0;
  Slot slot{0, -1};
  const int32_t index = window + static_cast<int32_t>(threadIdx.x);
  if (index < turn.num_current) slot = ReadSlot(heap, batch, Phase::kExchange, turn.epoch, index);
  __syncthreads();
  const unsigned alike = __match_any_sync(kWholeWarp, slot.writer);
  const uint32_t before = __popc(alike & ((1u << lane) - 1));
  if (slot.writer >= 0 && before == 0)
    tasks->in_warp[warp][slot.writer] = static_cast<uint16_t>(__popc(alike));
  __syncthreads();
  if (slot.writer >= 0) {
    uint32_t nth = tasks->of_writer[slot.writer] + before;
    for (uint32_t w = 0; w < warp; ++w) nth += tasks->in_warp[w][slot.writer];
    const uint32_t first_block =
        static_cast<uint32_t>(static_cast<uint64_t>(nth) * pieces % gridDim.x);
    const uint32_t piece = (blockIdx.x + gridDim.x - first_block) % gridDim.x;
    if (piece < pieces) {
      const bool own = slot.writer == static_cast<int32_t>(heap.rank);
      const uint32_t place =
          own ? atomicAdd(&tasks->num_pushes, 1) : kWindow - 1 - atomicAdd(&tasks->num_drains, 1);
      tasks->pushes_then_drains[place] = {slot.page, static_cast<uint16_t>(threadIdx.x),
                                          static_cast<uint8_t>(piece),
                                          static_cast<uint8_t>(slot.writer)};
    }
  }
  __syncthreads();
  if (threadIdx.x < kMaxRanks) {
    for (uint32_t w = 0; w < kWarps; ++w)
      tasks->of_writer[threadIdx.x] += tasks->in_warp[w][threadIdx.x];
  }
}

__device__ inline uint64_t* DataWord(const DeviceHeap& heap, uint32_t owner, uint64_t exchange,
                                     uint64_t slot, uint32_t piece) {
  return reinterpret_cast<uint64_t*>(heap.slab[owner] + heap.layout.DataWordsOffset(exchange)) +
         slot * heap.layout.MaxPieces() + piece;
}

// One warp: a piece of an own page into every peer's staging, then its data words.
__device__ inline void Push(const DeviceHeap& heap, const DeviceBatch& batch, uint64_t exchange,
                            uint64_t data_word, uint32_t pieces, int32_t window, const Task& task) {
  const Geometry& geometry = heap.layout.geometry;
  const uint32_t lane = threadIdx.x % 32, cp_size = geometry.cp_size;
  const uint64_t slot = static_cast<uint64_t>(window) + task.window_slot;
  ForEachPart(geometry, pieces, task.piece, [&](uint32_t b, uint64_t offset, uint64_t nbytes) {
    const uint64_t staged = geometry.SlotOffset(exchange, b, slot) + offset;
    CopyGranules(DensePage(heap, batch, b, task.page) + offset, nbytes, lane, 32,
                 [&](uint32_t i, const uint4& v) {
                   for (uint32_t step = 1; step < cp_size; ++step) {
                     const uint32_t peer = (heap.rank + step) % cp_size;
                     reinterpret_cast<uint4*>(heap.slab[peer] + staged)[i] = v;
                   }
                 });
  });
  __syncwarp();  // the lanes' stores come before the releases below
  for (uint32_t peer = lane; peer < cp_size; peer += 32) {
    if (peer != heap.rank)
      StoreRelease(DataWord(heap, peer, exchange, slot, task.piece), data_word);
  }
}

// One warp: waits for a peer's piece and copies it into the dense buffer. False if it never came.
__device__ inline bool Drain(const DeviceHeap& heap, const DeviceBatch& batch, uint64_t exchange,
                             uint64_t data_word, uint32_t pieces, int32_t window, const Task& task,
                             bool alive) {
  const Geometry& geometry = heap.layout.geometry;
  const uint32_t lane = threadIdx.x % 32;
  const uint64_t slot = static_cast<uint64_t>(window) + task.window_slot;
  const uint64_t* const word = DataWord(heap, heap.rank, exchange, slot, task.piece);
  // Every lane loads the word itself, so that the acquire is its own.
  alive = alive && WaitAll(heap, task.writer, exchange, Phase::kExchange,
                           [&] { return LoadAcquire(word) == data_word; });
  ForEachPart(geometry, pieces, task.piece, [&](uint32_t b, uint64_t offset, uint64_t nbytes) {
    char* const page = DensePage(heap, batch, b, task.page) + offset;
    if (!alive) return FillLost(page, nbytes, lane, 32);
    CopyGranules(heap.slab[heap.rank] + geometry.SlotOffset(exchange, b, slot) + offset, nbytes,
                 lane, 32,
                 [&](uint32_t i, const uint4& v) { reinterpret_cast<uint4*>(page)[i] = v; });
  });
  return alive;
}

__device__ inline void ExchangePieces(const DeviceHeap& heap, const DeviceBatch& batch,
                                      const Turn& turn, uint16_t fingerprint) {
  __shared__ Tasks tasks;
  const uint64_t exchange = turn.epoch + 1;
  const uint64_t data_word = ArriveWord(exchange, fingerprint);
  const uint32_t pieces = Pieces(heap, turn.num_current);
  const uint32_t warp = threadIdx.x / 32;
  if (threadIdx.x < kMaxRanks) tasks.of_writer[threadIdx.x] = 0;
  bool alive = turn.status == kOpen;
  for (int32_t window = 0; window < turn.num_current; window += kWindow) {
    __syncthreads();  // the lists of the window before have served
    ListTasks(heap, batch, turn, pieces, window, &tasks);
    if (warp < kPushWarps) {
      if (turn.status != kOpen) continue;
      for (uint32_t i = warp; i < tasks.num_pushes; i += kPushWarps)
        Push(heap, batch, exchange, data_word, pieces, window, tasks.pushes_then_drains[i]);
    } else {
      for (uint32_t i = warp - kPushWarps; i < tasks.num_drains; i += kWarps - kPushWarps)
        alive = Drain(heap, batch, exchange, data_word, pieces, window,
                      tasks.pushes_then_drains[kWindow - 1 - i], alive);
    }
  }
}

__global__ void __launch_bounds__(kThreads, 1)
    ExchangeKernel(const __grid_constant__ DeviceHeap heap,
                   const __grid_constant__ DeviceBatch batch) {
  const Turn turn = Enter(heap, batch);
  if (turn.status == kGone) return;
  const uint64_t exchange = turn.epoch + 1;
  const uint16_t fingerprint = FoldFingerprint(turn.fingerprint ^ kFusedMark);
  const bool meets = blockIdx.x == 0 && threadIdx.x < kMaxRanks && turn.status == kOpen;
  if (meets && turn.published_epoch == exchange) {
    Fail(heap, MakeFault(FaultCode::kPublishedTwice, Phase::kExchange, heap.rank, exchange));
  }
  if (meets) Arrive(heap, exchange, fingerprint);
  // A poisoned heap takes the large way, which marks the pages as lost and signals nothing.
  const uint64_t total_nbytes = turn.num_current * heap.layout.SlotNbytes();
  if (total_nbytes <= kMaxPacketedNbytes && turn.status == kOpen) {
    ExchangePackets(heap, batch, turn);
  } else {
    ExchangePieces(heap, batch, turn, fingerprint);
  }
  // Push warps do it, so that ranks that disagree on the batch learn of it while others wait.
  if (meets) AwaitArrivals(heap, exchange, fingerprint, Phase::kExchange);
}

}  // namespace

void LaunchExchange(const DeviceHeap& heap, const DeviceBatch& batch, cudaStream_t stream) {
  ExchangeKernel<<<heap.num_blocks, kThreads, 0, stream>>>(heap, batch);
}

cudaError_t LoadExchangeKernels() {
  return LoadKernel(reinterpret_cast<const void*>(ExchangeKernel));
}

cudaError_t MaxExchangeBlocks(uint32_t* num_blocks) {
  int device = 0, multiprocessors = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (error == cudaSuccess)
    *num_blocks = std::min(kMaxGrid, std::max(1u, static_cast<uint32_t>(multiprocessors) / 2));
  return error;
}

}  // namespace symmkv
