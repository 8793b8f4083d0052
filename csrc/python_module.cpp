// attn_qat._C: build information and the scalar number format, for tools and tests. It links the operator
// library, so importing it registers torch.ops.attn_qat; the package works without it.
#include <pybind11/pybind11.h>

#include "build_info.h"
#include "format/nvfp4.h"

namespace py = pybind11;
using namespace attn_qat;

namespace {

py::dict build_info() { return py::module_::import("json").attr("loads")(attn_qat_build_info()); }

// [(kernel, [targets])], empty when built without CUDA.
py::list kernels() { return py::list(build_info()["kernels"].attr("items")()); }

float block_scale(float amax) { return nvfp4::block_scale(nvfp4::magnitude_bits(amax)); }

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "Build information of attn_qat and scalar NVFP4 functions.";
  m.def("build_info", &build_info);
  m.def("kernels", &kernels);

  m.def("e2m1_encode", &nvfp4::e2m1_encode, py::arg("x"), py::arg("scale") = 1.0f,
        "4-bit code of x / scale: nearest even, saturated at 6");
  m.def("e2m1_decode", &nvfp4::e2m1_decode, py::arg("code"));
  m.def(
      "e4m3_encode", [](float x) { return nvfp4::e4m3_encode(nvfp4::e4m3_round(x)); }, py::arg("x"),
      "Byte of x >= 0: nearest even, saturated at 448");
  m.def("e4m3_decode", &nvfp4::e4m3_decode, py::arg("byte"));
  m.def("block_scale", &block_scale, py::arg("amax"), "Scale of a block whose largest magnitude is amax");
  m.def("fake_quantize", &nvfp4::fake_quantize, py::arg("x"), py::arg("scale"), "Nearest code * scale of x");
}
