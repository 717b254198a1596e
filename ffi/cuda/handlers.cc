// Operands and results: ffi/shm/handlers.cc. Each handler checks what the host can see and launches
// one kernel. XLA calls new_ticket's at every execution and the others, which are command-buffer
// compatible, only to record; what changes from one execution to the next is therefore checked on
// the device.
#include "ffi/cuda/handlers.h"

#include <cuda_runtime_api.h>

#include <memory>
#include <optional>
#include <string>

#include "ffi/cause.h"
#include "ffi/cuda/kernels.h"

namespace ffi = xla::ffi;

namespace symmkv {

Registry<CudaContext>& CudaRegistry() {
  static auto* registry = new Registry<CudaContext>;  // outlives XLA's threads
  return *registry;
}

namespace {

using Ticket = ffi::Buffer<ffi::S32>;
using TicketOut = ffi::Result<Ticket>;
using Ints = ffi::Buffer<ffi::S32>;
using Fingerprint = ffi::Buffer<ffi::U32>;
using Stream = ffi::PlatformStream<cudaStream_t>;
using Failure = CudaContext::Failure;

ffi::Error ToError(const Failure& failure) {
  return failure ? ffi::Error(ffi::ErrorCode::kAborted, *failure) : ffi::Error::Success();
}

ffi::Error NoContext(Phase phase, int64_t heap_id) {
  return ffi::Error(ffi::ErrorCode::kFailedPrecondition,
                    std::string(PhaseName(phase)) + ": heap " + std::to_string(heap_id) +
                        " is closed, or not of this device; keep the heap open while its programs "
                        "run, and run them on the mesh that it was created with");
}

// A launch that fails leaves an error that the next call of anybody would report.
ffi::Error Launched(Phase phase) {
  const cudaError_t error = cudaGetLastError();
  if (error == cudaSuccess) return ffi::Error::Success();
  return ffi::Error(ffi::ErrorCode::kInternal, std::string(PhaseName(phase)) +
                                                   ": launch failed: " + cudaGetErrorString(error));
}

void PassTicket(cudaStream_t stream, const Ticket& in, TicketOut& out) {
  if (out->typed_data() == in.typed_data()) return;
  cudaMemcpyAsync(out->typed_data(), in.typed_data(), sizeof(int32_t), cudaMemcpyDeviceToDevice,
                  stream);
}

// The dense operands into the batch, or why they can't be used. A gather writes them, so there a
// result must be the operand itself.
Failure ReadDense(const Geometry& geometry, ffi::RemainingArgs args, const ffi::RemainingRets* rets,
                  DeviceBatch* batch) {
  if (args.size() != geometry.num_buffers) {
    return "needs " + std::to_string(geometry.num_buffers) + " dense buffers, got " +
           std::to_string(args.size());
  }
  if (rets != nullptr && rets->size() != args.size()) {
    return "needs as many results as dense operands, got " + std::to_string(rets->size()) +
           " and " + std::to_string(args.size());
  }
  for (uint32_t b = 0; b < geometry.num_buffers; ++b) {
    const auto arg = args.get<ffi::AnyBuffer>(b);
    if (arg.has_error()) return arg.error().message();
    const uint64_t page_nbytes = geometry.page_nbytes[b];
    if (b == 0) batch->num_dense_pages = static_cast<int64_t>(arg->size_bytes() / page_nbytes);
    if (arg->size_bytes() != static_cast<uint64_t>(batch->num_dense_pages) * page_nbytes) {
      return "dense buffer " + std::to_string(b) + " has " + std::to_string(arg->size_bytes()) +
             " bytes, needs " + std::to_string(batch->num_dense_pages) + " pages of " +
             std::to_string(page_nbytes);
    }
    batch->dense[b] = static_cast<char*>(arg->untyped_data());
    if (rets == nullptr) continue;
    auto ret = rets->get<ffi::AnyBuffer>(b);
    if (ret.has_error()) return ret.error().message();
    if ((*ret)->untyped_data() != arg->untyped_data()) {
      return "dense buffer " + std::to_string(b) +
             " is not updated in place; call it through jax_symmkv, which aliases operand and "
             "result";
    }
  }
  return std::nullopt;
}

using Launch = void (*)(const DeviceHeap&, const DeviceBatch&, cudaStream_t);

ffi::Error RunBatchCall(Phase phase, Launch launch, cudaStream_t stream, int64_t heap_id,
                        int32_t device, const Ticket& ticket, TicketOut& out, const Ints& page,
                        const Ints& writer, const Ints& num_current, const Fingerprint& fingerprint,
                        ffi::RemainingArgs args, const ffi::RemainingRets* rets) {
  const std::shared_ptr<CudaContext> context = CudaRegistry().Find(heap_id, device);
  if (context == nullptr) return NoContext(phase, heap_id);
  if (auto unusable = context->Unusable()) return ToError(unusable);
  if (writer.element_count() != page.element_count() || num_current.element_count() != 1 ||
      fingerprint.element_count() != 1) {
    return ToError(context->Refuse(phase, "the plan's arrays differ in length"));
  }
  DeviceBatch batch{};
  batch.page = page.typed_data();
  batch.writer = writer.typed_data();
  batch.num_current = num_current.typed_data();
  batch.fingerprint = fingerprint.typed_data();
  batch.capacity = static_cast<int64_t>(page.element_count());
  if (auto refusal = ReadDense(context->geometry(), args, rets, &batch)) {
    return ToError(context->Refuse(phase, *refusal));
  }
  PassTicket(stream, ticket, out);
  launch(context->device_heap(), batch, stream);
  return Launched(phase);
}

// new_ticket. A program may start with the tickets of several heaps, so it guards them all.
ffi::Error NewTicketImpl(cudaStream_t stream, ffi::Span<const int64_t> heap_ids, int32_t device,
                         Ints axis_index, TicketOut out) {
  if (static_cast<size_t>(axis_index.element_count()) != heap_ids.size()) {
    return ffi::Error(ffi::ErrorCode::kInvalidArgument, "new_ticket: needs one axis index a heap");
  }
  for (size_t i = 0; i < heap_ids.size(); ++i) {
    const std::shared_ptr<CudaContext> context = CudaRegistry().Find(heap_ids[i], device);
    if (context == nullptr) return NoContext(Phase::kTicket, heap_ids[i]);
    if (auto unusable = context->Unusable()) return ToError(unusable);
    LaunchNewTicket(context->device_heap(), axis_index.typed_data() + i, stream);
  }
  cudaMemsetAsync(out->typed_data(), 0, sizeof(int32_t), stream);
  return Launched(Phase::kTicket);
}

ffi::Error PublishImpl(cudaStream_t stream, int64_t heap_id, int32_t device, Ticket ticket,
                       Ints page, Ints writer, Ints num_current, Fingerprint fingerprint,
                       ffi::RemainingArgs dense, TicketOut out) {
  return RunBatchCall(Phase::kPublish, &LaunchPublish, stream, heap_id, device, ticket, out, page,
                      writer, num_current, fingerprint, dense, nullptr);
}

ffi::Error BarrierImpl(cudaStream_t stream, int64_t heap_id, int32_t device, Ticket ticket,
                       TicketOut out) {
  const std::shared_ptr<CudaContext> context = CudaRegistry().Find(heap_id, device);
  if (context == nullptr) return NoContext(Phase::kBarrier, heap_id);
  if (auto unusable = context->Unusable()) return ToError(unusable);
  PassTicket(stream, ticket, out);
  LaunchBarrier(context->device_heap(), stream);
  return Launched(Phase::kBarrier);
}

ffi::Error GatherImpl(cudaStream_t stream, int64_t heap_id, int32_t device, Ticket ticket,
                      Ints page, Ints writer, Ints num_current, Fingerprint fingerprint,
                      ffi::RemainingArgs dense, TicketOut out, ffi::RemainingRets dense_out) {
  return RunBatchCall(Phase::kGather, &LaunchGather, stream, heap_id, device, ticket, out, page,
                      writer, num_current, fingerprint, dense, &dense_out);
}

ffi::Error ExchangeImpl(cudaStream_t stream, int64_t heap_id, int32_t device, Ticket ticket,
                        Ints page, Ints writer, Ints num_current, Fingerprint fingerprint,
                        ffi::RemainingArgs dense, TicketOut out, ffi::RemainingRets dense_out) {
  return RunBatchCall(Phase::kExchange, &LaunchExchange, stream, heap_id, device, ticket, out, page,
                      writer, num_current, fingerprint, dense, &dense_out);
}

auto BindHeap() {
  return ffi::Ffi::Bind().Ctx<Stream>().Attr<int64_t>("heap_id").Ctx<ffi::DeviceOrdinal>();
}

auto BindBatch() {
  return BindHeap()
      .Arg<Ticket>()
      .Arg<Ints>()         // current_page
      .Arg<Ints>()         // current_writer
      .Arg<Ints>()         // num_current
      .Arg<Fingerprint>()  // fingerprint
      .RemainingArgs()     // dense buffers
      .Ret<Ticket>();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(NewTicketCuda, NewTicketImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<Stream>()
                                  .Attr<ffi::Span<const int64_t>>("heap_ids")
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Arg<Ints>()  // axis_index [heaps], -1: process-local
                                  .Ret<Ticket>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(PublishCuda, PublishImpl, BindBatch(),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(BarrierCuda, BarrierImpl, BindHeap().Arg<Ticket>().Ret<Ticket>(),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(GatherCuda, GatherImpl, BindBatch().RemainingRets(),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(ExchangeCuda, ExchangeImpl, BindBatch().RemainingRets(),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace symmkv
