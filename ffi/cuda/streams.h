// Ranks as streams of one process: raw launches and captured graphs, for tests and benchmarks.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ffi/cuda/context.h"

namespace symmkv {

// Bytes on the current device, its own or a view of a slab. Reads and writes go over a stream of
// their own, so that they wait for no kernel.
class DeviceArray {
 public:
  explicit DeviceArray(uint64_t nbytes);
  // A rank's slab as the context's GPU maps it; not to be used after the context has left.
  DeviceArray(const CudaContext& context, uint32_t rank);
  ~DeviceArray();
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;

  char* base() const { return base_; }
  uint64_t nbytes() const { return nbytes_; }
  void Write(uint64_t offset, const std::string& bytes);
  std::string Read(uint64_t offset, uint64_t nbytes) const;

 private:
  const uint64_t nbytes_;
  const bool owns_;
  char* base_ = nullptr;
  cudaStream_t stream_ = nullptr;
};

// A call's operands: `plan` holds page[capacity], writer[capacity], num_current and fingerprint, in
// this order; each dense buffer begins `guard_nbytes` into its array.
struct Operands {
  std::shared_ptr<DeviceArray> plan;
  int64_t capacity;
  int64_t num_dense_pages;
  std::vector<std::shared_ptr<DeviceArray>> dense;
  uint64_t guard_nbytes;

  DeviceBatch Batch() const;
};

class Stream {
 public:
  Stream();
  ~Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  void Publish(const CudaContext& context, const Operands& operands);
  void Barrier(const CudaContext& context);
  void Gather(const CudaContext& context, const Operands& operands);
  void Exchange(const CudaContext& context, const Operands& operands);
  void Delay(uint64_t delay_us);
  void Copy(const DeviceArray& to, const DeviceArray& from, uint64_t nbytes);

  // What is launched from here to EndCapture becomes the stream's graph.
  void BeginCapture();
  void EndCapture();
  // Launches the graph, and records when it began and ended.
  void Replay();
  // Of the last replay; waits for it.
  float ReplayUs();
  void Synchronize();

 private:
  cudaStream_t stream_ = nullptr;
  cudaGraphExec_t graph_ = nullptr;
  cudaEvent_t began_ = nullptr, ended_ = nullptr;
};

}  // namespace symmkv
