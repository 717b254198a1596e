// What both extension modules say to Python alike.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "ffi/cause.h"
#include "ffi/registry.h"
#include "xla/ffi/api/ffi.h"

namespace symmkv {

namespace nb = nanobind;

// A call that may wait for a peer, or for a lock that such a call holds.
using Wait = nb::call_guard<nb::gil_scoped_release>;

inline Geometry MakeGeometry(uint32_t cp_size, uint64_t num_slots,
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
template <class Context>
nb::object PoisonedTuple(const Context& context) {
  std::optional<Cause> cause;
  {
    // A call in progress may hold the context's lock for long.
    const nb::gil_scoped_release release;
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

inline nb::capsule Capsule(XLA_FFI_Handler* handler) {
  return nb::capsule(reinterpret_cast<void*>(handler));
}

// What heap.py uses of either context, once it is constructed.
template <class Context>
void BindContext(nb::class_<Context>& bound, Registry<Context>& (*registry)()) {
  bound.def_prop_ro("address", &Context::address)
      .def_prop_ro("nbytes", &Context::nbytes)
      .def_prop_ro("rank", &Context::rank)
      .def_prop_ro("epoch", &Context::epoch, Wait())
      .def("map", &Context::Map, nb::arg("addresses"), nb::arg("nonces"), Wait())
      .def("verify_greetings", &Context::VerifyGreetings)
      .def("unlink", &Context::Unlink)
      .def("undrained", &Context::Undrained, Wait())
      .def("poisoned", &PoisonedTuple<Context>)
      .def(
          "register",
          [registry](std::shared_ptr<Context> self, int64_t heap_id, int64_t device) {
            if (!registry().Put(heap_id, device, std::move(self))) {
              throw std::runtime_error("heap id " + std::to_string(heap_id) + " is taken");
            }
          },
          nb::arg("heap_id"), nb::arg("device"))
      .def(
          "unregister",
          [registry](Context&, int64_t heap_id, int64_t device) {
            registry().Remove(heap_id, device);
          },
          nb::arg("heap_id"), nb::arg("device"))
      .def("leave", &Context::Leave, Wait())
      .def("close", &Context::Close, Wait())
      .def("abandon", &Context::Abandon);
}

}  // namespace symmkv
