#include "ffi/cuda/context.h"

#include <algorithm>
#include <chrono>
#include <map>
#include <stdexcept>
#include <utility>

#include "ffi/cause.h"
#include "ffi/cuda/kernels.h"

namespace symmkv {
namespace {

// How often the watcher looks; a failure on one rank reaches another's kernels within two looks.
constexpr auto kWatchInterval = std::chrono::milliseconds(1);
// Looks between two questions whether the peers live.
constexpr int kLooksPerLife = 50;
// How long Close waits for the peers; then the slab is kept.
constexpr uint64_t kMaxCloseMs = 10'000;

constexpr char kClosedText[] =
    "the heap is closed; create it before the program runs and close it after";

// A line of device memory that is never freed: a captured graph may be replayed after its heap is
// closed, and has to read there that it is.
HeapState* NewState(int device) {
  constexpr size_t kBlockLines = 512;
  static std::mutex mutex;
  static auto* blocks =
      new std::map<int, std::pair<HeapState*, size_t>>;  // by device: block, lines used
  const std::lock_guard lock(mutex);
  auto& [block, used] = (*blocks)[device];
  if (block == nullptr || used == kBlockLines) {
    void* memory = nullptr;
    Check(cudaMalloc(&memory, kBlockLines * sizeof(HeapState)), "cudaMalloc of heap states");
    block = static_cast<HeapState*>(memory);
    used = 0;
  }
  return block + used++;
}

Segment NewControlSegment(uint32_t rank, uint64_t nonce) {
  Segment segment = Segment::Create(kHalvesOffset);
  SlabHeader* const header = segment.header();
  header->magic = kMagic;
  header->layout_version = kLayoutVersion;
  header->rank = rank;
  header->nonce = nonce;
  return segment;
}

}  // namespace

CudaContext::CudaContext(const Geometry& geometry, uint32_t rank, uint64_t nonce,
                         uint64_t first_epoch, uint64_t timeout_ms, int device, uint32_t max_blocks)
    : device_(device), timeout_ms_(timeout_ms), nonce_(nonce) {
  const OnDevice on(device);
  heap_.layout.geometry = geometry;
  heap_.rank = rank;
  heap_.timeout_ns = timeout_ms * 1'000'000;
  Check(MaxExchangeBlocks(&heap_.num_blocks), "cudaDeviceGetAttribute");
  if (max_blocks != 0) heap_.num_blocks = std::min(heap_.num_blocks, max_blocks);
  Check(LoadBarrierKernels(), "loading the barrier's kernels");
  Check(LoadPagesKernels(), "loading publish and gather");
  Check(LoadExchangeKernels(), "loading the exchange");

  created_ = NewControlSegment(rank, nonce);
  slab_ = DeviceSlab::Create(device, heap_.layout.SlabNbytes());
  heap_.slab[rank] = slab_.base();
  SlabHeader header{};
  header.magic = kMagic;
  header.layout_version = kLayoutVersion;
  header.rank = rank;
  header.nonce = nonce;
  Check(cudaMemcpy(slab_.base(), &header, sizeof header, cudaMemcpyHostToDevice),
        "cudaMemcpy of the header");
  const std::vector<Mailbox> mailboxes(geometry.cp_size, Mailbox{ArriveWord(first_epoch, 0), 0});
  Check(cudaMemcpy(slab_.base() + kMailboxesOffset, mailboxes.data(),
                   mailboxes.size() * sizeof(Mailbox), cudaMemcpyHostToDevice),
        "cudaMemcpy of the mailboxes");
  heap_.state = NewState(device);
  HeapState state{};
  state.epoch = first_epoch;
  Check(cudaMemcpy(heap_.state, &state, sizeof state, cudaMemcpyHostToDevice),
        "cudaMemcpy of the state");
  void* host = nullptr;
  Check(cudaHostAlloc(&host, sizeof(HostWords), cudaHostAllocMapped), "cudaHostAlloc");
  heap_.host = new (host) HostWords{};
  Check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
  Check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");  // a memset is asynchronous
}

CudaContext::~CudaContext() {
  StopWatching();
  if (stream_ != nullptr) cudaStreamDestroy(stream_);
  if (heap_.host != nullptr) cudaFreeHost(heap_.host);
}

std::string CudaContext::address() const {
  return created_.name() + " " + std::to_string(heap_.num_blocks) + " " + slab_.Address().ToText();
}

void CudaContext::Map(const std::vector<std::string>& addresses,
                      const std::vector<uint64_t>& nonces) {
  const std::lock_guard lock(mutex_);
  const OnDevice on(device_);
  const uint32_t cp_size = geometry().cp_size;
  std::vector<Segment> controls(cp_size);
  const SlabAddress own = slab_.Address();
  for (uint32_t peer = 0; peer < cp_size; ++peer) {
    const std::string& text = addresses.at(peer);
    const size_t name_end = text.find(' '), blocks_end = text.find(' ', name_end + 1);
    if (blocks_end == std::string::npos)
      throw std::runtime_error("not the address of a slab: " + text);
    // The smallest rank decides: who drains a piece is who pushed it, by number.
    const auto num_blocks = std::stoul(text.substr(name_end + 1, blocks_end - name_end - 1));
    heap_.num_blocks = std::min(heap_.num_blocks, static_cast<uint32_t>(num_blocks));
    if (peer == heap_.rank) continue;
    controls[peer] = Segment::Open(text.substr(0, name_end), kHalvesOffset);
    const SlabAddress address = SlabAddress::FromText(text.substr(blocks_end + 1));
    mapped_.push_back(MappedSlab::Map(device_, address));
    heap_.slab[peer] = mapped_.back().base();
  }
  void* greeted = nullptr;
  Check(cudaMalloc(&greeted, cp_size * sizeof(uint64_t)), "cudaMalloc");
  LaunchGreet(heap_, static_cast<uint64_t*>(greeted), stream_);
  std::vector<uint64_t> read(cp_size);
  cudaMemcpyAsync(read.data(), greeted, cp_size * sizeof(uint64_t), cudaMemcpyDeviceToHost,
                  stream_);
  const cudaError_t error = cudaStreamSynchronize(stream_);
  cudaFree(greeted);
  Check(error, "reading the peers' slabs");
  for (uint32_t peer = 0; peer < cp_size; ++peer) {
    if (read[peer] != nonces.at(peer)) {
      throw std::runtime_error("what GPU " + own.device_uuid + " reads of rank " +
                               std::to_string(peer) +
                               "'s slab is not what that rank wrote: peer access does not work");
    }
  }
  controls[heap_.rank] = std::move(created_);
  peers_ = std::make_unique<Peers>(heap_.rank, std::move(controls), WaitLimits{timeout_ms_, 0});
  watcher_ = std::make_unique<std::thread>([this] { Watch(); });
}

void CudaContext::VerifyGreetings() const {
  const OnDevice on(device_);
  for (uint32_t peer = 0; peer < geometry().cp_size; ++peer) {
    const auto mailbox =
        ReadDevice<Mailbox>(slab_.base() + kMailboxesOffset + peer * sizeof(Mailbox));
    if (mailbox.greeting != nonce_) {
      throw std::runtime_error("what rank " + std::to_string(peer) +
                               " wrote into the slab of rank " + std::to_string(heap_.rank) +
                               " did not arrive: peer access does not work");
    }
  }
}

void CudaContext::Unlink() {
  const std::lock_guard lock(mutex_);
  if (peers_ != nullptr) {
    peers_->UnlinkOwn();
  } else {
    created_.Unlink();
  }
}

uint64_t CudaContext::epoch() const {
  const std::lock_guard lock(mutex_);
  return left_ ? 0 : ReadDevice<HeapState>(heap_.state).epoch;
}

CudaContext::Failure CudaContext::Unusable() const {
  const std::lock_guard lock(mutex_);
  if (left_ || peers_ == nullptr) return kClosedText;
  Spread();
  const std::optional<Cause> cause = peers_->Poisoned();
  if (!cause) return std::nullopt;
  return CauseText(*cause, geometry().cp_size);
}

CudaContext::Failure CudaContext::Refuse(Phase phase, const std::string& detail) {
  const uint64_t exchange = epoch() + 1;
  {
    const std::lock_guard lock(mutex_);
    if (left_ || peers_ == nullptr) return kClosedText;
    peers_->Poison(MakeCause(CauseCode::kFailed, phase, heap_.rank, exchange, detail));
  }
  return Unusable();
}

std::optional<Cause> CudaContext::Poisoned() const {
  const std::lock_guard lock(mutex_);
  if (peers_ == nullptr) return std::nullopt;
  Spread();
  return peers_->Poisoned();
}

CudaContext::Failure CudaContext::Undrained() const {
  const std::lock_guard lock(mutex_);
  if (left_ || peers_ == nullptr) return kClosedText;
  const OnDevice on(device_);
  const uint64_t epoch = ReadDevice<HeapState>(heap_.state).epoch;
  for (uint32_t peer = 0; peer < geometry().cp_size; ++peer) {
    if (peer == heap_.rank) continue;  // needs no word of its own
    const auto mailbox =
        ReadDevice<Mailbox>(slab_.base() + kMailboxesOffset + peer * sizeof(Mailbox));
    const uint64_t arrived = EpochOf(mailbox.arrive);
    // A peer that waits for this rank is one ahead.
    if (arrived == epoch || arrived == epoch + 1) continue;
    return "rank " + std::to_string(peer) + " arrived at exchange " + std::to_string(arrived) +
           ", this rank, " + std::to_string(heap_.rank) + ", has done " + std::to_string(epoch);
  }
  return std::nullopt;
}

void CudaContext::Leave() {
  {
    const std::lock_guard lock(mutex_);
    if (left_) return;
    left_ = true;
  }
  const OnDevice on(device_);
  // What is under way ends as it would have; what a replayed graph starts after that finds the heap
  // gone, and what it started in between has ended with the second wait. Errors are the programs'.
  cudaDeviceSynchronize();
  const uint32_t gone = kGone;
  cudaMemcpyAsync(&heap_.state->status, &gone, sizeof gone, cudaMemcpyHostToDevice, stream_);
  cudaStreamSynchronize(stream_);
  cudaDeviceSynchronize();
  StopWatching();
  const std::lock_guard lock(mutex_);
  if (peers_ != nullptr) Spread();
  mapped_.clear();
  cudaGetLastError();
  // Release: a peer that sees it knows that this rank touches nobody's memory any more.
  if (peers_ != nullptr) __atomic_store_n(&peers_->own()->closed, 1, __ATOMIC_RELEASE);
}

void CudaContext::Close() {
  Leave();
  const std::lock_guard lock(mutex_);
  if (peers_ != nullptr) {
    const auto deadline = std::chrono::steady_clock::now() +
                          std::chrono::milliseconds(std::min(timeout_ms_, kMaxCloseMs));
    for (uint32_t peer = 0; peer < geometry().cp_size; ++peer) {
      const Segment& control = peers_->slab(peer);
      // Acquire: pairs with the release in the peer's Leave.
      const auto has_left = [&] {
        return __atomic_load_n(&control.header()->closed, __ATOMIC_ACQUIRE) != 0;
      };
      while (!has_left() && control.OwnerAlive() && std::chrono::steady_clock::now() < deadline) {
        std::this_thread::sleep_for(kWatchInterval);
      }
      // One that died may have kernels that still run.
      if (!has_left()) slab_.Keep();
    }
  }
  slab_.Release();
  created_.Release();
  peers_.reset();
}

void CudaContext::Abandon() {
  // The thread is the parent's, and so is everything of CUDA.
  static_cast<void>(watcher_.release());
  created_.Abandon();
  if (peers_ != nullptr) peers_->Abandon();
  peers_.reset();
  slab_.Keep();
  for (MappedSlab& slab : mapped_) new (&slab) MappedSlab;
  stream_ = nullptr;
  heap_.host = nullptr;
  left_ = true;
}

void CudaContext::Watch() {
  std::unique_lock lock(mutex_);
  volatile HostWords* const host = heap_.host;
  for (int look = 0; !stop_.wait_for(lock, kWatchInterval, [this] { return stopping_; }); ++look) {
    Spread();
    if (peers_->Poisoned()) host->abort = 1;
    if (look % kLooksPerLife != 0) continue;
    for (uint32_t peer = 0; peer < geometry().cp_size; ++peer) {
      const Segment& control = peers_->slab(peer);
      if (peer == heap_.rank) continue;
      // Closed first: one that closed, then ended, has not died.
      if (__atomic_load_n(&control.header()->closed, __ATOMIC_ACQUIRE) != 0) {
        host->closed = host->closed | uint64_t{1} << peer;
      } else if (!control.OwnerAlive()) {
        host->died = host->died | uint64_t{1} << peer;
      }
    }
  }
}

void CudaContext::StopWatching() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  stop_.notify_all();
  if (watcher_ != nullptr && watcher_->joinable()) watcher_->join();
  watcher_.reset();
}

void CudaContext::Spread() const {
  // Acquire: pairs with the kernel's fence before it sets `failed`.
  if (heap_.host == nullptr || __atomic_load_n(&heap_.host->failed, __ATOMIC_ACQUIRE) == 0) return;
  if (!peers_->Poisoned()) peers_->Poison(MakeCause(heap_.host->fault, timeout_ms_));
}

template <class T>
T CudaContext::ReadDevice(const void* from) const {
  const OnDevice on(device_);
  T value{};
  // On a stream of its own: it must not wait for a kernel that waits for a peer.
  cudaMemcpyAsync(&value, from, sizeof value, cudaMemcpyDeviceToHost, stream_);
  Check(cudaStreamSynchronize(stream_), "reading the heap's state from the GPU");
  return value;
}

}  // namespace symmkv
