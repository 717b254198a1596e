// One rank's end of a heap on a GPU.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "ffi/cuda/device_heap.h"
#include "ffi/cuda/slab.h"
#include "ffi/shm/peers.h"
#include "ffi/shm/segment.h"

namespace symmkv {

// Beside the slab on the GPU each rank has a control segment: the header of a slab in shared
// memory. It carries what hosts tell each other: proof of life, "closed", and the abort record.
class CudaContext {
 public:
  using Failure = std::optional<std::string>;

  // Allocates this rank's slab on the device. Throws std::runtime_error, as do Map and
  // VerifyGreetings.
  CudaContext(const Geometry& geometry, uint32_t rank, uint64_t nonce, uint64_t first_epoch,
              uint64_t timeout_ms, int device, uint32_t max_blocks);
  ~CudaContext();

  // --- agreement by doing, in this order, the ranks in step (jax_symmkv/mapping.py) ---
  // What peers need to map it.
  std::string address() const;
  // Maps every peer's slab, reads its nonce by a kernel, through the mapping, and writes it back.
  void Map(const std::vector<std::string>& addresses, const std::vector<uint64_t>& nonces);
  // Every peer has written this rank's nonce back.
  void VerifyGreetings() const;
  void Unlink();

  const DeviceHeap& device_heap() const { return heap_; }
  const Geometry& geometry() const { return heap_.layout.geometry; }
  uint32_t rank() const { return heap_.rank; }
  int device() const { return device_; }
  uint64_t nbytes() const { return heap_.layout.SlabNbytes(); }
  uint64_t epoch() const;

  // Why no call can be made any more, if so: closed or poisoned.
  Failure Unusable() const;
  // A call that could not even be launched: peers learn of it.
  Failure Refuse(Phase phase, const std::string& detail);
  std::optional<Cause> Poisoned() const;
  // Nothing, or how an arrive word differs from the epoch. Exact when no exchange is in flight.
  Failure Undrained() const;

  // Close, in two steps, since a rank's memory must outlast its peers' kernels.
  // Waits for the device, makes later launches do nothing, tells the peers, unmaps their slabs.
  void Leave();
  // Waits for the peers to leave, then frees the slab; keeps it until the process ends if one
  // doesn't, or died.
  void Close();
  // In a forked child, where CUDA is not usable: lets go of the parent's files and nothing else.
  void Abandon();

 private:
  void Watch();
  void StopWatching();
  // Carries what a kernel recorded to the peers.
  void Spread() const;
  template <class T>
  T ReadDevice(const void* from) const;

  const int device_;
  const uint64_t timeout_ms_;
  const uint64_t nonce_;
  DeviceHeap heap_{};
  DeviceSlab slab_;
  std::vector<MappedSlab> mapped_;
  Segment created_;                // the control segment, until Map hands it to peers_
  std::unique_ptr<Peers> peers_;   // control segments; null before Map and after Close
  cudaStream_t stream_ = nullptr;  // for the host's looks at device memory
  bool left_ = false;

  mutable std::mutex mutex_;
  std::condition_variable stop_;
  bool stopping_ = false;
  std::unique_ptr<std::thread> watcher_;
};

}  // namespace symmkv
