// ffi/cuda/streams.h for Python.
#pragma once

#include "ffi/binding.h"
#include "ffi/cuda/streams.h"

namespace symmkv {

inline void BindStreams(nb::module_& m) {
  nb::class_<DeviceArray>(m, "DeviceArray")
      .def(nb::init<uint64_t>(), nb::arg("nbytes"))
      .def_prop_ro("nbytes", &DeviceArray::nbytes)
      .def("write",
           [](DeviceArray& self, uint64_t offset, nb::bytes bytes) {
             self.Write(offset, std::string(bytes.c_str(), bytes.size()));
           })
      .def("read", [](const DeviceArray& self, uint64_t offset, uint64_t nbytes) {
        const std::string bytes = self.Read(offset, nbytes);
        return nb::bytes(bytes.data(), bytes.size());
      });
  m.def(
      "slab",
      [](const CudaContext& context, uint32_t rank) {
        return std::make_shared<DeviceArray>(context, rank);
      },
      nb::arg("context"), nb::arg("rank"), "A rank's slab as the context's GPU maps it.");
  nb::class_<Operands>(m, "Operands")
      .def(
          "__init__",
          [](Operands* self, std::shared_ptr<DeviceArray> plan, int64_t capacity,
             int64_t num_dense_pages, std::vector<std::shared_ptr<DeviceArray>> dense,
             uint64_t guard_nbytes) {
            new (self) Operands{std::move(plan), capacity, num_dense_pages, std::move(dense),
                                guard_nbytes};
          },
          nb::kw_only(), nb::arg("plan"), nb::arg("capacity"), nb::arg("num_dense_pages"),
          nb::arg("dense"), nb::arg("guard_nbytes"));
  nb::class_<Stream>(m, "Stream")
      .def(nb::init<>())
      .def("publish", &Stream::Publish, Wait())
      .def("barrier", &Stream::Barrier, Wait())
      .def("gather", &Stream::Gather, Wait())
      .def("exchange", &Stream::Exchange, Wait())
      .def("delay", &Stream::Delay, nb::arg("delay_us"))
      .def("copy", &Stream::Copy)
      .def("begin_capture", &Stream::BeginCapture)
      .def("end_capture", &Stream::EndCapture)
      .def("replay", &Stream::Replay, Wait())
      .def("replay_us", &Stream::ReplayUs, Wait())
      .def("synchronize", &Stream::Synchronize, Wait());
}

}  // namespace symmkv
