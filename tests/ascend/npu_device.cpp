// A device called "npu" whose memory is the host's: tensors lie behind their own allocator, which counts every byte, and every
// operation is computed by the CPU's kernel for it. npu_device.py gives it its Python half.

#include <torch/extension.h>

#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <set>
#include <string>

namespace {

constexpr auto NPU = c10::DeviceType::PrivateUse1;
constexpr size_t ALIGNMENT = 512;  // the device's own; the header before each block takes one unit of it

// Memory

std::atomic<int64_t> allocated{0};
std::atomic<int64_t> peak{0};

struct Header {
  size_t bytes;
};

void release(void* pointer) {
  if (pointer == nullptr) return;
  char* block = static_cast<char*>(pointer) - ALIGNMENT;
  allocated -= reinterpret_cast<Header*>(block)->bytes;
  free(block);
}

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* pointer = nullptr;
    if (bytes > 0) {
      void* block = nullptr;
      TORCH_CHECK(posix_memalign(&block, ALIGNMENT, bytes + ALIGNMENT) == 0, "no memory for ", bytes, " bytes");
      static_cast<Header*>(block)->bytes = bytes;
      pointer = static_cast<char*>(block) + ALIGNMENT;
      const int64_t now = allocated += static_cast<int64_t>(bytes);
      int64_t highest = peak;
      while (now > highest && !peak.compare_exchange_weak(highest, now)) {
      }
    }
    return {pointer, pointer, &release, c10::Device(NPU, 0)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { memcpy(to, from, bytes); }
};

Allocator allocator;
REGISTER_ALLOCATOR(NPU, &allocator);

// What torch asks of any device: which one is current, streams, events. There is one of each, and it never waits.

struct Guard final : c10::impl::NoOpDeviceGuardImpl<NPU> {
  static c10::Device device() { return c10::Device(NPU, 0); }
  static c10::Stream stream() { return c10::Stream(c10::Stream::DEFAULT, device()); }

  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Device exchangeDevice(c10::Device) const override { return device(); }
  c10::Device getDevice() const override { return device(); }
  c10::Stream getStream(c10::Device) const noexcept override { return stream(); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream(); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return stream(); }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  void init() const override {}
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::Device getDeviceFromPtr(void*) const override { return c10::Device(NPU, 0); }
  bool isPinnedPtr(const void*) const override { return false; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetAllocator(c10::DeviceType::CPU); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto* self = storage.unsafeGetStorageImpl();
    auto larger = allocator.allocate(bytes);
    const size_t kept = std::min(bytes, self->nbytes());
    if (kept > 0) memcpy(larger.get(), self->data(), kept);
    self->set_data_ptr(std::move(larger));
    self->set_nbytes(bytes);
  }
};

// Operations: those that make or view memory are here, all others are the CPU's.

at::Tensor on_host(const at::Tensor& tensor) {
  if (tensor.is_cpu()) return tensor;
  static int64_t nothing = 0;
  char* base = static_cast<char*>(tensor.storage().unsafeGetStorageImpl()->mutable_data_ptr().get());
  void* first = base ? base + tensor.storage_offset() * tensor.element_size() : reinterpret_cast<char*>(&nothing);
  return at::from_blob(first, tensor.sizes(), tensor.strides(), at::TensorOptions().dtype(tensor.dtype()));
}

at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  at::Tensor target = on_host(to);
  target.copy_(on_host(from));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (to.sizes() != from.sizes()) const_cast<at::Tensor&>(to).resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar_dense(const at::Tensor& self) { return at::_local_scalar_dense(on_host(self)); }

at::Tensor as_strided(const at::Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride,
                      std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}

at::Tensor view(const at::Tensor& self, c10::IntArrayRef size) { return at::native::view(self, size); }

at::Tensor reshape_alias(const at::Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::native::_reshape_alias(self, size, stride);
}

at::Tensor unfold(const at::Tensor& self, int64_t dim, int64_t size, int64_t step) {
  return at::native::unfold(self, dim, size, step);
}

const at::Tensor& resize(const at::Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  return at::native::resize_(self, size, format);
}

at::Tensor& set(at::Tensor& self, at::Storage storage, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::native::set_storage_cpu_(self, storage, offset, size, stride);
}

// A chip's own units know no float64: what is asked to compute in it is noted.
std::set<std::string> doubles;

void by_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  for (const auto& value : torch::jit::last(*stack, op.schema().arguments().size())) {
    if (value.isTensor() && value.toTensor().defined() && value.toTensor().device().type() == NPU &&
        value.toTensor().scalar_type() == at::kDouble) {
      doubles.insert(op.schema().name());
    }
  }
  at::native::cpu_fallback(op, stack);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("unfold", unfold);
  m.impl("resize_", resize);
  m.impl("set_.source_Storage_storage_offset", set);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&by_cpu>()); }

}  // namespace

namespace at::autocast {

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(mm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(addmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(bmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(cross_entropy_loss, fp32)
  KERNEL_PRIVATEUSEONE(log_softmax, int, fp32)
}

}  // namespace at::autocast

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("init", [] {
    static Hooks hooks;
    at::RegisterPrivateUse1HooksInterface(&hooks);
  });
  m.def("allocated", [] { return static_cast<int64_t>(allocated); });
  m.def("peak", [] { return static_cast<int64_t>(peak); });
  m.def("reset_peak", [] { peak = static_cast<int64_t>(allocated); });
  m.def("doubles", [] { return std::vector<std::string>(doubles.begin(), doubles.end()); });
}
