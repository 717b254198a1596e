// The extension module: contexts for jax_symmkv/heap.py, handlers for jax_symmkv/compat.py.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>

#include "ffi/cause.h"
#include "ffi/shm/handlers.h"

namespace nb = nanobind;

namespace symmkv {
namespace {

Geometry MakeGeometry(uint32_t cp_size, uint64_t num_slots,
                      const std::vector<uint64_t>& page_nbytes) {
  if (cp_size < 1 || cp_size > kMaxRanks || page_nbytes.empty() ||
      page_nbytes.size() > kMaxBuffers) {
    throw std::invalid_argument("geometry: " + std::to_string(cp_size) + " ranks (1 to " +
                                std::to_string(kMaxRanks) + ") and " +
                                std::to_string(page_nbytes.size()) + " buffers (1 to " +
                                std::to_string(kMaxBuffers) + ")");
  }
  Geometry geometry{cp_size, static_cast<uint32_t>(page_nbytes.size()), num_slots, {}};
  for (size_t b = 0; b < page_nbytes.size(); ++b) geometry.page_nbytes[b] = page_nbytes[b];
  return geometry;
}

// What heap.py turns into a PeerError: (message, rank, missing, epoch, phase).
nb::object PoisonedTuple(const ShmContext& context) {
  std::optional<Cause> cause;
  {
    const nb::gil_scoped_release
        release;  // a call in progress may hold the context's lock for long
    cause = context.Poisoned();
  }
  if (!cause) return nb::none();
  nb::list missing;
  for (uint32_t r = 0; r < context.geometry().cp_size; ++r) {
    if (cause->missing >> r & 1) missing.append(r);
  }
  return nb::make_tuple(CauseText(*cause, context.geometry().cp_size), cause->rank,
                        nb::tuple(missing), cause->epoch, PhaseName(cause->phase));
}

nb::capsule Capsule(XLA_FFI_Handler* handler) {
  return nb::capsule(reinterpret_cast<void*>(handler));
}

nb::dict Registrations() {
  nb::dict cpu;
  cpu["symmkv_new_ticket"] = Capsule(&NewTicket);
  cpu["symmkv_publish"] = Capsule(&Publish);
  cpu["symmkv_barrier"] = Capsule(&Barrier);
  cpu["symmkv_gather"] = Capsule(&Gather);
  cpu["symmkv_exchange"] = Capsule(&Exchange);
  nb::dict platforms;
  platforms["cpu"] = cpu;
  return platforms;
}

}  // namespace

NB_MODULE(SYMMKV_MODULE, m) {
  m.attr("FFI_VERSION") = nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
  m.attr("LAYOUT_VERSION") = kLayoutVersion;
  m.attr("MAX_RANKS") = kMaxRanks;
  m.attr("MAX_BUFFERS") = kMaxBuffers;
  m.attr("PAGE_GRANULE_NBYTES") = kPageGranuleNbytes;
  m.def("registrations", &Registrations, "Platform -> target name -> handler capsule.");
  m.def("sweep_stale_segments", &Segment::SweepStale,
        "Removes the names of segments whose owners are gone.");
  m.def(
      "slab_nbytes",
      [](uint32_t cp_size, uint64_t num_slots, const std::vector<uint64_t>& page_nbytes) {
        return MakeGeometry(cp_size, num_slots, page_nbytes).SlabNbytes();
      },
      nb::arg("cp_size"), nb::arg("num_slots"), nb::arg("page_nbytes"));

  using Wait = nb::call_guard<nb::gil_scoped_release>;
  nb::class_<ShmContext>(m, "ShmContext")
      .def(
          "__init__",
          [](ShmContext* self, uint32_t rank, uint32_t cp_size, uint64_t num_slots,
             const std::vector<uint64_t>& page_nbytes, uint64_t nonce, uint64_t first_epoch,
             uint64_t timeout_ms, uint64_t spin_us) {
            new (self) ShmContext(MakeGeometry(cp_size, num_slots, page_nbytes), rank, nonce,
                                  first_epoch, WaitLimits{timeout_ms, spin_us});
          },
          nb::kw_only(), nb::arg("rank"), nb::arg("cp_size"), nb::arg("num_slots"),
          nb::arg("page_nbytes"), nb::arg("nonce"), nb::arg("first_epoch"), nb::arg("timeout_ms"),
          nb::arg("spin_us"))
      .def_prop_ro("segment_name", &ShmContext::segment_name)
      .def_prop_ro("rank", &ShmContext::rank)
      .def_prop_ro("epoch", &ShmContext::epoch, Wait())
      .def("map", &ShmContext::Map, nb::arg("names"), nb::arg("nonces"), Wait())
      .def("verify_greetings", &ShmContext::VerifyGreetings)
      .def("unlink", &ShmContext::Unlink)
      .def("undrained", &ShmContext::Undrained, Wait())
      .def("poisoned", &PoisonedTuple)
      .def(
          "register",
          [](std::shared_ptr<ShmContext> self, int64_t heap_id, int64_t device) {
            if (!ShmRegistry().Put(heap_id, device, std::move(self))) {
              throw std::runtime_error("heap id " + std::to_string(heap_id) + " is taken");
            }
          },
          nb::arg("heap_id"), nb::arg("device"))
      .def("close", &ShmContext::Close, Wait())
      .def("abandon", &ShmContext::Abandon);
  m.def(
      "unregister", [](int64_t heap_id, int64_t device) { ShmRegistry().Remove(heap_id, device); },
      nb::arg("heap_id"), nb::arg("device"));
}

}  // namespace symmkv
