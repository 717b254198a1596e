#include "ffi/shm/context.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "ffi/cause.h"
#include "ffi/fault.h"
#include "ffi/shm/stream_copy.h"

namespace symmkv {
namespace {

// Consecutive slots of one writer that are consecutive in the dense buffer too: one copy.
int32_t RunLength(const Batch& batch, int32_t slot) {
  int32_t end = slot + 1;
  while (end < batch.num_current && batch.writer[end] == batch.writer[slot] &&
         batch.page[end] == batch.page[end - 1] + 1) {
    ++end;
  }
  return end - slot;
}

// Visits the batch's pages of every buffer, run by run: visit(writer, offset in the writer's slab,
// place in the dense buffer, nbytes). One addressing for both sides of an exchange.
template <class Visit>
void ForEachRun(const Geometry& geometry, uint64_t exchange, const Batch& batch,
                const std::vector<Dense>& dense, Visit visit) {
  for (int32_t slot = 0; slot < batch.num_current;) {
    const int32_t run = RunLength(batch, slot);
    for (uint32_t b = 0; b < geometry.num_buffers; ++b) {
      const uint64_t page_nbytes = geometry.page_nbytes[b];
      visit(static_cast<uint32_t>(batch.writer[slot]),
            geometry.SlotOffset(exchange, b, static_cast<uint64_t>(slot)),
            dense[b].data + static_cast<uint64_t>(batch.page[slot]) * page_nbytes,
            static_cast<uint64_t>(run) * page_nbytes);
    }
    slot += run;
  }
}

// A gather of more than this leaves nothing in the caches for the attention that follows, so its
// stores need not fetch the lines that they overwrite.
constexpr uint64_t kMinStreamedGatherNbytes = 8 << 20;

void CachedCopy(char* to, const char* from, uint64_t nbytes) { std::memcpy(to, from, nbytes); }

constexpr char kClosedText[] =
    "the heap is closed; create it before the program runs and close it after";

}  // namespace

// A call in progress: holds the lock, and shows the phase for as long as it lasts.
class ShmContext::Call {
 public:
  Call(ShmContext& context, Phase phase) : lock_(context.mutex_), peers_(context.peers_.get()) {
    if (peers_ != nullptr) __atomic_store_n(&peers_->own()->phase, phase, __ATOMIC_RELAXED);
  }
  ~Call() {
    if (peers_ != nullptr) __atomic_store_n(&peers_->own()->phase, Phase::kIdle, __ATOMIC_RELAXED);
  }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

 private:
  const std::lock_guard<std::mutex> lock_;
  Peers* const peers_;
};

ShmContext::ShmContext(const Geometry& geometry, uint32_t rank, uint64_t nonce,
                       uint64_t first_epoch, WaitLimits limits)
    : geometry_(geometry), rank_(rank), limits_(limits) {
  created_ = Segment::Create(geometry.SlabNbytes());
  SlabHeader* const header = created_.header();
  header->magic = kMagic;
  header->layout_version = kLayoutVersion;
  header->rank = rank;
  header->nonce = nonce;
  header->epoch = first_epoch;
  for (uint32_t source = 0; source < geometry.cp_size; ++source) {
    created_.mailbox(source)->arrive = ArriveWord(first_epoch, 0);
  }
}

const std::string& ShmContext::address() const { return created_.name(); }

void ShmContext::Map(const std::vector<std::string>& addresses,
                     const std::vector<uint64_t>& nonces) {
  const std::lock_guard lock(mutex_);
  std::vector<Segment> slabs(geometry_.cp_size);
  for (uint32_t peer = 0; peer < geometry_.cp_size; ++peer) {
    if (peer == rank_) continue;
    slabs[peer] = Segment::Open(addresses.at(peer), geometry_.SlabNbytes());
    const SlabHeader* const header = slabs[peer].header();
    if (header->magic != kMagic || header->layout_version != kLayoutVersion ||
        header->rank != peer || header->nonce != nonces.at(peer)) {
      throw std::runtime_error("shared memory " + addresses[peer] + " is not the slab of rank " +
                               std::to_string(peer));
    }
    slabs[peer].mailbox(rank_)->greeting = header->nonce;
  }
  slabs[rank_] = std::move(created_);
  slabs[rank_].mailbox(rank_)->greeting = slabs[rank_].header()->nonce;
  peers_ = std::make_unique<Peers>(rank_, std::move(slabs), limits_);
}

void ShmContext::VerifyGreetings() const {
  const std::lock_guard lock(mutex_);
  const Segment& own = peers_->slab(rank_);
  for (uint32_t peer = 0; peer < geometry_.cp_size; ++peer) {
    if (own.mailbox(peer)->greeting != own.header()->nonce) {
      throw std::runtime_error("what rank " + std::to_string(peer) +
                               " wrote into the slab of rank " + std::to_string(rank_) +
                               " did not arrive");
    }
  }
}

void ShmContext::Unlink() {
  const std::lock_guard lock(mutex_);
  if (peers_ != nullptr) {
    peers_->UnlinkOwn();
  } else {
    created_.Unlink();
  }
}

ShmContext::Failure ShmContext::Publish(const Batch& batch, const std::vector<Dense>& dense) {
  const Call call(*this, Phase::kPublish);
  if (auto failure = Check(Phase::kPublish, batch, dense)) return failure;
  return PublishPages(Phase::kPublish, batch, dense);
}

ShmContext::Failure ShmContext::Barrier() {
  const Call call(*this, Phase::kBarrier);
  if (auto failure = Unusable()) return failure;
  return Meet(Phase::kBarrier);
}

ShmContext::Failure ShmContext::Gather(const Batch& batch, const std::vector<Dense>& dense) {
  const Call call(*this, Phase::kGather);
  if (auto failure = Check(Phase::kGather, batch, dense)) return failure;
  const SlabHeader& own = *peers_->own();
  // Epoch 0: nobody has published yet.
  if (own.published_epoch != own.epoch || own.epoch == 0) {
    return Fail(Phase::kGather,
                own.published_epoch > own.epoch ? FaultCode::kNotMet : FaultCode::kNotPublished);
  }
  if (own.published_fingerprint != batch.fingerprint) {
    return Fail(Phase::kGather, FaultCode::kOtherPlan);
  }
  GatherPages(batch, dense);
  return std::nullopt;
}

ShmContext::Failure ShmContext::Exchange(const Batch& batch, const std::vector<Dense>& dense) {
  const Call call(*this, Phase::kExchange);
  if (auto failure = Check(Phase::kExchange, batch, dense)) return failure;
  if (auto failure = PublishPages(Phase::kExchange, batch, dense)) return failure;
  if (auto failure = Meet(Phase::kExchange)) return failure;
  GatherPages(batch, dense);
  return std::nullopt;
}

ShmContext::Failure ShmContext::Guard(int32_t axis_index) {
  const std::lock_guard lock(mutex_);
  if (auto failure = Unusable()) return failure;
  if (axis_index >= 0 && static_cast<uint32_t>(axis_index) != rank_) {
    return Fail(Phase::kTicket, FaultCode::kWrongIndex, 0, axis_index);
  }
  return std::nullopt;
}

ShmContext::Failure ShmContext::Refuse(Phase phase, const std::string& detail) {
  const std::lock_guard lock(mutex_);
  if (peers_ == nullptr) return kClosedText;
  return Fail(phase, detail);
}

// Everything that can be wrong with a call's operands, before a byte is moved. Page ids are checked
// here once for publish and gather alike, so the copy loops are free of it.
ShmContext::Failure ShmContext::Check(Phase phase, const Batch& batch,
                                      const std::vector<Dense>& dense) {
  if (auto failure = Unusable()) return failure;
  if (dense.size() != geometry_.num_buffers) {
    return Fail(phase, "needs " + std::to_string(geometry_.num_buffers) + " dense buffers, got " +
                           std::to_string(dense.size()));
  }
  const uint64_t num_dense_pages = dense[0].nbytes / geometry_.page_nbytes[0];
  for (uint32_t b = 0; b < geometry_.num_buffers; ++b) {
    if (dense[b].nbytes != num_dense_pages * geometry_.page_nbytes[b]) {
      return Fail(phase, "dense buffer " + std::to_string(b) + " has " +
                             std::to_string(dense[b].nbytes) + " bytes, needs " +
                             std::to_string(num_dense_pages) + " pages of " +
                             std::to_string(geometry_.page_nbytes[b]));
    }
  }
  if (batch.num_current < 0 || batch.num_current > batch.capacity ||
      static_cast<uint64_t>(batch.num_current) > geometry_.num_slots) {
    return Fail(phase, FaultCode::kBadCount, 0, batch.num_current,
                std::min(batch.capacity, static_cast<int64_t>(geometry_.num_slots)));
  }
  for (int32_t slot = 0; slot < batch.num_current; ++slot) {
    const int32_t page = batch.page[slot];
    const int32_t writer = batch.writer[slot];
    if (page < 0 || static_cast<uint64_t>(page) >= num_dense_pages) {
      return Fail(phase, FaultCode::kBadPage, slot, page, static_cast<int64_t>(num_dense_pages));
    }
    if (writer < 0 || static_cast<uint32_t>(writer) >= geometry_.cp_size) {
      return Fail(phase, FaultCode::kBadWriter, slot, writer, geometry_.cp_size);
    }
  }
  return std::nullopt;
}

// Writes the own pages into the half of the exchange to come. Its last readers were the gathers two
// exchanges ago, and their ranks have signalled the exchange in between after them.
ShmContext::Failure ShmContext::PublishPages(Phase phase, const Batch& batch,
                                             const std::vector<Dense>& dense) {
  SlabHeader* const own = peers_->own();
  const uint64_t exchange = own->epoch + 1;
  if (own->published_epoch == exchange) {
    return Fail(phase, FaultCode::kPublishedTwice);
  }
  const Segment& slab = peers_->slab(rank_);
  ForEachRun(geometry_, exchange, batch, dense,
             [&](uint32_t writer, uint64_t offset, char* pages, uint64_t nbytes) {
               if (writer == rank_) StreamCopy(slab.at(offset), pages, nbytes);
             });
  StreamFence();  // before the barrier's arrive words
  own->published_epoch = exchange;
  own->published_fingerprint = batch.fingerprint;
  return std::nullopt;
}

// The barrier of the exchange to come; the epoch advances here and nowhere else.
ShmContext::Failure ShmContext::Meet(Phase phase) {
  SlabHeader* const own = peers_->own();
  const uint64_t exchange = own->epoch + 1;
  const uint16_t fingerprint =
      own->published_epoch == exchange ? FoldFingerprint(own->published_fingerprint) : uint16_t{0};
  if (auto cause = peers_->Barrier(exchange, fingerprint, phase)) return Explain(cause);
  // Release: a peer's check reads it.
  __atomic_store_n(&own->epoch, exchange, __ATOMIC_RELEASE);
  return std::nullopt;
}

// Reads the peers' pages of the exchange just met.
void ShmContext::GatherPages(const Batch& batch, const std::vector<Dense>& dense) {
  const uint64_t exchange = peers_->own()->epoch;
  const auto copy = GatheredNbytes(batch) < kMinStreamedGatherNbytes ? CachedCopy : StreamCopy;
  ForEachRun(geometry_, exchange, batch, dense,
             [&](uint32_t writer, uint64_t offset, char* pages, uint64_t nbytes) {
               if (writer != rank_) copy(pages, peers_->slab(writer).at(offset), nbytes);
             });
  StreamFence();  // before another thread learns that the call has ended
}

uint64_t ShmContext::GatheredNbytes(const Batch& batch) const {
  uint64_t slot_nbytes = 0;
  for (uint32_t b = 0; b < geometry_.num_buffers; ++b) slot_nbytes += geometry_.page_nbytes[b];
  const auto own =
      std::count(batch.writer, batch.writer + batch.num_current, static_cast<int32_t>(rank_));
  return static_cast<uint64_t>(batch.num_current - own) * slot_nbytes;
}

ShmContext::Failure ShmContext::Fail(Phase phase, const std::string& detail) {
  const Cause cause = MakeCause(CauseCode::kFailed, phase, rank_, peers_->own()->epoch + 1, detail);
  peers_->Poison(cause);
  return Explain(peers_->Poisoned().value_or(cause));
}

ShmContext::Failure ShmContext::Fail(Phase phase, FaultCode code, int32_t slot, int64_t value,
                                     int64_t bound) {
  return Fail(phase, FaultText(Fault{code, phase, rank_, slot, value, bound, 0, 0}));
}

ShmContext::Failure ShmContext::Unusable() const {
  if (peers_ == nullptr) return kClosedText;
  return Explain(peers_->Poisoned());
}

ShmContext::Failure ShmContext::Explain(const std::optional<Cause>& cause) const {
  if (!cause) return std::nullopt;
  return CauseText(*cause, geometry_.cp_size);
}

void ShmContext::Leave() {
  const std::lock_guard lock(mutex_);
  if (peers_ == nullptr) return;
  // Release: a peer that sees it also sees the last arrive word of this rank.
  __atomic_store_n(&peers_->own()->closed, 1, __ATOMIC_RELEASE);
  // The memory itself lives until the last rank has unmapped it, so peers may go on reading.
  peers_.reset();
}

void ShmContext::Close() {
  Leave();
  const std::lock_guard lock(mutex_);
  created_.Release();
}

void ShmContext::Abandon() {
  created_.Abandon();
  if (peers_ != nullptr) peers_->Abandon();
  peers_.reset();
}

std::optional<Cause> ShmContext::Poisoned() const {
  const std::lock_guard lock(mutex_);
  return peers_ == nullptr ? std::nullopt : peers_->Poisoned();
}

uint64_t ShmContext::epoch() const {
  const std::lock_guard lock(mutex_);
  return peers_ == nullptr ? 0 : peers_->own()->epoch;
}

ShmContext::Failure ShmContext::Undrained() const {
  const std::lock_guard lock(mutex_);
  if (peers_ == nullptr) return kClosedText;
  const Segment& own = peers_->slab(rank_);
  const uint64_t epoch = own.header()->epoch;
  for (uint32_t peer = 0; peer < geometry_.cp_size; ++peer) {
    const uint64_t arrived = EpochOf(__atomic_load_n(&own.mailbox(peer)->arrive, __ATOMIC_ACQUIRE));
    const bool ahead = arrived == epoch + 1 && __atomic_load_n(&peers_->slab(peer).header()->phase,
                                                               __ATOMIC_ACQUIRE) != Phase::kIdle;
    if (arrived != epoch && !ahead) {
      return "rank " + std::to_string(peer) + " arrived at exchange " + std::to_string(arrived) +
             ", this rank, " + std::to_string(rank_) + ", has done " + std::to_string(epoch);
    }
  }
  return std::nullopt;
}

}  // namespace symmkv
