// Operands of publish, gather and exchange: ticket s32[1], current_page s32[C], current_writer
// s32[C], num_current s32[1], fingerprint u32[1], then the dense buffers. Results: ticket, then
// (but for publish) the dense buffers, each aliased to its operand. Attribute heap_id: s64.
//
// XLA:CPU runs a handler in a thread of its own choosing, which may block here; it runs no stage
// but instantiate and execute.
#include "ffi/shm/handlers.h"

#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ffi/cause.h"

namespace ffi = xla::ffi;

namespace symmkv {

Registry<ShmContext>& ShmRegistry() {
  static auto* registry = new Registry<ShmContext>;  // outlives XLA's threads
  return *registry;
}

namespace {

using Ticket = ffi::Buffer<ffi::S32>;
using TicketOut = ffi::Result<Ticket>;
using Ints = ffi::Buffer<ffi::S32>;
using Fingerprint = ffi::Buffer<ffi::U32>;

ffi::Error ToError(const ShmContext::Failure& failure) {
  return failure ? ffi::Error(ffi::ErrorCode::kAborted, *failure) : ffi::Error::Success();
}

ffi::Error NoContext(Phase phase, int64_t heap_id) {
  return ffi::Error(ffi::ErrorCode::kFailedPrecondition,
                    std::string(PhaseName(phase)) + ": heap " + std::to_string(heap_id) +
                        " is closed, or not of this device; keep the heap open while its programs "
                        "run, and run them on the mesh that it was created with");
}

void PassTicket(const Ticket& in, TicketOut& out) {
  if (out->typed_data() != in.typed_data()) *out->typed_data() = *in.typed_data();
}

// The dense operands, or why they can't be used. A gather writes them, so there a result must be
// the operand itself.
std::optional<std::string> ReadDense(ffi::RemainingArgs args, const ffi::RemainingRets* rets,
                                     std::vector<Dense>* dense) {
  if (rets != nullptr && rets->size() != args.size()) {
    return "needs as many results as dense operands, got " + std::to_string(rets->size()) +
           " and " + std::to_string(args.size());
  }
  for (size_t i = 0; i < args.size(); ++i) {
    const auto arg = args.get<ffi::AnyBuffer>(i);
    if (arg.has_error()) return arg.error().message();
    dense->push_back({static_cast<char*>(arg->untyped_data()), arg->size_bytes()});
    if (rets == nullptr) continue;
    auto ret = rets->get<ffi::AnyBuffer>(i);
    if (ret.has_error()) return ret.error().message();
    if ((*ret)->untyped_data() != arg->untyped_data()) {
      return "dense buffer " + std::to_string(i) +
             " is not updated in place; call it through "
             "jax_symmkv, which aliases operand and result";
    }
  }
  return std::nullopt;
}

using BatchCall = ShmContext::Failure (ShmContext::*)(const Batch&, const std::vector<Dense>&);

ffi::Error RunBatchCall(Phase phase, BatchCall run, int64_t heap_id, int32_t device,
                        const Ints& page, const Ints& writer, const Ints& num_current,
                        const Fingerprint& fingerprint, ffi::RemainingArgs args,
                        const ffi::RemainingRets* rets) {
  const std::shared_ptr<ShmContext> context = ShmRegistry().Find(heap_id, device);
  if (context == nullptr) return NoContext(phase, heap_id);
  if (writer.element_count() != page.element_count() || num_current.element_count() != 1 ||
      fingerprint.element_count() != 1) {
    return ToError(context->Refuse(phase, "the plan's arrays differ in length"));
  }
  std::vector<Dense> dense;
  if (auto refusal = ReadDense(args, rets, &dense)) {
    return ToError(context->Refuse(phase, *refusal));
  }
  const Batch batch{page.typed_data(), writer.typed_data(),
                    static_cast<int64_t>(page.element_count()), num_current.typed_data()[0],
                    fingerprint.typed_data()[0]};
  return ToError((context.get()->*run)(batch, dense));
}

// new_ticket. A program may start with the tickets of several heaps, so it guards them all.
ffi::Error NewTicketImpl(ffi::Span<const int64_t> heap_ids, int32_t device, Ints axis_index,
                         TicketOut out) {
  if (static_cast<size_t>(axis_index.element_count()) != heap_ids.size()) {
    return ffi::Error(ffi::ErrorCode::kInvalidArgument, "new_ticket: needs one axis index a heap");
  }
  for (size_t i = 0; i < heap_ids.size(); ++i) {
    const std::shared_ptr<ShmContext> context = ShmRegistry().Find(heap_ids[i], device);
    if (context == nullptr) return NoContext(Phase::kTicket, heap_ids[i]);
    ffi::Error error = ToError(context->Guard(axis_index.typed_data()[i]));
    if (error.failure()) return error;
  }
  *out->typed_data() = 0;
  return ffi::Error::Success();
}

ffi::Error PublishImpl(int64_t heap_id, int32_t device, Ticket ticket, Ints page, Ints writer,
                       Ints num_current, Fingerprint fingerprint, ffi::RemainingArgs dense,
                       TicketOut out) {
  PassTicket(ticket, out);
  return RunBatchCall(Phase::kPublish, &ShmContext::Publish, heap_id, device, page, writer,
                      num_current, fingerprint, dense, nullptr);
}

ffi::Error BarrierImpl(int64_t heap_id, int32_t device, Ticket ticket, TicketOut out) {
  PassTicket(ticket, out);
  const std::shared_ptr<ShmContext> context = ShmRegistry().Find(heap_id, device);
  if (context == nullptr) return NoContext(Phase::kBarrier, heap_id);
  return ToError(context->Barrier());
}

ffi::Error GatherImpl(int64_t heap_id, int32_t device, Ticket ticket, Ints page, Ints writer,
                      Ints num_current, Fingerprint fingerprint, ffi::RemainingArgs dense,
                      TicketOut out, ffi::RemainingRets dense_out) {
  PassTicket(ticket, out);
  return RunBatchCall(Phase::kGather, &ShmContext::Gather, heap_id, device, page, writer,
                      num_current, fingerprint, dense, &dense_out);
}

ffi::Error ExchangeImpl(int64_t heap_id, int32_t device, Ticket ticket, Ints page, Ints writer,
                        Ints num_current, Fingerprint fingerprint, ffi::RemainingArgs dense,
                        TicketOut out, ffi::RemainingRets dense_out) {
  PassTicket(ticket, out);
  return RunBatchCall(Phase::kExchange, &ShmContext::Exchange, heap_id, device, page, writer,
                      num_current, fingerprint, dense, &dense_out);
}

auto BindHeap() { return ffi::Ffi::Bind().Attr<int64_t>("heap_id").Ctx<ffi::DeviceOrdinal>(); }

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

XLA_FFI_DEFINE_HANDLER_SYMBOL(NewTicket, NewTicketImpl,
                              ffi::Ffi::Bind()
                                  .Attr<ffi::Span<const int64_t>>("heap_ids")
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Arg<Ints>()  // axis_index [heaps], -1: process-local
                                  .Ret<Ticket>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(Publish, PublishImpl, BindBatch());
XLA_FFI_DEFINE_HANDLER_SYMBOL(Barrier, BarrierImpl, BindHeap().Arg<Ticket>().Ret<Ticket>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(Gather, GatherImpl, BindBatch().RemainingRets());
XLA_FFI_DEFINE_HANDLER_SYMBOL(Exchange, ExchangeImpl, BindBatch().RemainingRets());

}  // namespace symmkv
