#include "ffi/cuda/streams.h"

#include <stdexcept>

#include "ffi/cuda/kernels.h"

namespace symmkv {

DeviceArray::DeviceArray(uint64_t nbytes) : nbytes_(nbytes), owns_(true) {
  void* base = nullptr;
  Check(cudaMalloc(&base, nbytes), "cudaMalloc of " + std::to_string(nbytes) + " bytes");
  base_ = static_cast<char*>(base);
  Check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
}

DeviceArray::DeviceArray(const CudaContext& context, uint32_t rank)
    : nbytes_(context.nbytes()), owns_(false) {
  if (rank >= context.geometry().cp_size) throw std::invalid_argument("slab: no such rank");
  base_ = context.device_heap().slab[rank];
  Check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
}

DeviceArray::~DeviceArray() {
  cudaStreamDestroy(stream_);
  if (owns_) cudaFree(base_);
}

void DeviceArray::Write(uint64_t offset, const std::string& bytes) {
  if (offset + bytes.size() > nbytes_) throw std::runtime_error("write past the end of the array");
  Check(
      cudaMemcpyAsync(base_ + offset, bytes.data(), bytes.size(), cudaMemcpyHostToDevice, stream_),
      "cudaMemcpyAsync");
  Check(cudaStreamSynchronize(stream_), "writing to the device");
}

std::string DeviceArray::Read(uint64_t offset, uint64_t nbytes) const {
  if (offset + nbytes > nbytes_) throw std::runtime_error("read past the end of the array");
  std::string bytes(nbytes, '\0');
  Check(cudaMemcpyAsync(bytes.data(), base_ + offset, nbytes, cudaMemcpyDeviceToHost, stream_),
        "cudaMemcpyAsync");
  Check(cudaStreamSynchronize(stream_), "reading from the device");
  return bytes;
}

DeviceBatch Operands::Batch() const {
  DeviceBatch batch{};
  const auto* const ints = reinterpret_cast<const int32_t*>(plan->base());
  batch.page = ints;
  batch.writer = ints + capacity;
  batch.num_current = ints + 2 * capacity;
  batch.fingerprint = reinterpret_cast<const uint32_t*>(ints + 2 * capacity + 1);
  batch.capacity = capacity;
  batch.num_dense_pages = num_dense_pages;
  for (size_t b = 0; b < dense.size() && b < kMaxBuffers; ++b) {
    batch.dense[b] = dense[b]->base() + guard_nbytes;
  }
  return batch;
}

Stream::Stream() {
  Check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
  Check(cudaEventCreate(&began_), "cudaEventCreate");
  Check(cudaEventCreate(&ended_), "cudaEventCreate");
}

Stream::~Stream() {
  if (graph_ != nullptr) cudaGraphExecDestroy(graph_);
  cudaEventDestroy(began_);
  cudaEventDestroy(ended_);
  cudaStreamDestroy(stream_);
}

void Stream::Publish(const CudaContext& context, const Operands& operands) {
  LaunchPublish(context.device_heap(), operands.Batch(), stream_);
  Check(cudaGetLastError(), "publish");
}

void Stream::Barrier(const CudaContext& context) {
  LaunchBarrier(context.device_heap(), stream_);
  Check(cudaGetLastError(), "barrier");
}

void Stream::Gather(const CudaContext& context, const Operands& operands) {
  LaunchGather(context.device_heap(), operands.Batch(), stream_);
  Check(cudaGetLastError(), "gather");
}

void Stream::Exchange(const CudaContext& context, const Operands& operands) {
  LaunchExchange(context.device_heap(), operands.Batch(), stream_);
  Check(cudaGetLastError(), "exchange");
}

void Stream::Delay(uint64_t delay_us) {
  LaunchDelay(delay_us, stream_);
  Check(cudaGetLastError(), "delay");
}

void Stream::Copy(const DeviceArray& to, const DeviceArray& from, uint64_t nbytes) {
  Check(cudaMemcpyAsync(to.base(), from.base(), nbytes, cudaMemcpyDeviceToDevice, stream_), "copy");
}

void Stream::BeginCapture() {
  Check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal),
        "cudaStreamBeginCapture");
}

void Stream::EndCapture() {
  cudaGraph_t graph = nullptr;
  Check(cudaStreamEndCapture(stream_, &graph), "cudaStreamEndCapture");
  if (graph_ != nullptr) cudaGraphExecDestroy(graph_);
  const cudaError_t error = cudaGraphInstantiate(&graph_, graph, 0);
  cudaGraphDestroy(graph);
  Check(error, "cudaGraphInstantiate");
}

void Stream::Replay() {
  Check(cudaEventRecord(began_, stream_), "cudaEventRecord");
  Check(cudaGraphLaunch(graph_, stream_), "cudaGraphLaunch");
  Check(cudaEventRecord(ended_, stream_), "cudaEventRecord");
}

float Stream::ReplayUs() {
  float ms = 0;
  Check(cudaEventSynchronize(ended_), "replay");
  Check(cudaEventElapsedTime(&ms, began_, ended_), "cudaEventElapsedTime");
  return 1000 * ms;
}

void Stream::Synchronize() { Check(cudaStreamSynchronize(stream_), "cudaStreamSynchronize"); }

}  // namespace symmkv
