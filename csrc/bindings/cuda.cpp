// Bindings of the CUDA launchers: addresses and sizes in, error codes out. Structs travel as bytes
// in the layout that `layouts` reports.

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstring>
#include <string>
#include <type_traits>

#include "bindings/bindings.h"
#include "cuda/launch.h"

namespace py = pybind11;

namespace dpkern::bindings {
namespace {

using Address = std::uintptr_t;
using Size = std::int64_t;
using Free = py::call_guard<py::gil_scoped_release>;

template <class T>
T struct_of(const std::string& bytes) {
  static_assert(std::is_trivially_copyable_v<T>);
  if (bytes.size() != sizeof(T)) throw py::value_error("a struct of another size");
  T value;
  std::memcpy(&value, bytes.data(), sizeof(T));
  return value;
}

cuda::CudaStream on(Address stream) { return pointer<void>(stream); }

cuda::RowTable table_of(Address tasks, Size count, Size chunks, Size columns) {
  return {pointer<const RowTask>(tasks), count, chunks, columns};
}

cuda::Error keystream(const std::string& stream, std::uint64_t first_block, Size blocks,
                      Address out, Address cuda) {
  return cuda::keystream(struct_of<Stream>(stream), first_block, blocks,
                         pointer<std::uint32_t>(out), on(cuda));
}

cuda::Error lattice_draws(const std::string& stream, int law, std::uint64_t first, Size n,
                          Address x, Address cuda) {
  return cuda::lattice_draws(struct_of<Stream>(stream), static_cast<Distribution>(law), first, n,
                             pointer<std::int32_t>(x), on(cuda));
}

cuda::Error rounding_bits(const std::string& rounding, std::uint64_t first, Size n, Address bits,
                          Address cuda) {
  return cuda::rounding_bits(struct_of<Stream>(rounding), first, n, pointer<std::uint16_t>(bits),
                             on(cuda));
}

cuda::Error add_noise(const std::string& stream, const std::string& rounding, int law,
                      std::uint64_t first, Size n, int type, double per_unit, double cell,
                      Address x, Address nonfinite, Address cuda) {
  return cuda::add_noise(struct_of<Stream>(stream), struct_of<Stream>(rounding),
                         static_cast<Distribution>(law), first, n, static_cast<NoisedType>(type),
                         per_unit, cell, pointer<void>(x), pointer<Size>(nonfinite), on(cuda));
}

cuda::Error update_step(const std::string& plan, Address tasks, Address nonfinite, Address cuda) {
  return cuda::update_step(struct_of<UpdatePlan>(plan), pointer<const UpdateTask>(tasks),
                           pointer<Size>(nonfinite), on(cuda));
}

cuda::Error advance(Address clock, double beta1, double beta2, Address cuda) {
  return cuda::advance(pointer<UpdateClock>(clock), beta1, beta2, on(cuda));
}

cuda::Error randomize_symbols(const std::string& stream, std::uint64_t first,
                              const std::string& lies, int type, Address x, Size n, Address out,
                              Address cuda) {
  return cuda::randomize_symbols(struct_of<Stream>(stream), first, struct_of<Lies>(lies),
                                 static_cast<cuda::SymbolType>(type), pointer<const void>(x), n,
                                 pointer<void>(out), on(cuda));
}

cuda::Error coef_perturb(const std::string& plan, Address targets, Address linear,
                         Address quadratic, Address cuda) {
  return cuda::coef_perturb(struct_of<CoefPlan>(plan), pointer<const void>(targets),
                            pointer<void>(linear), pointer<void>(quadratic), on(cuda));
}

cuda::Error coef_quadratic(const std::string& plan, Address z, Address targets, Address shift,
                           Address loss, Address dz, Address cuda) {
  return cuda::coef_quadratic(struct_of<CoefPlan>(plan), pointer<const void>(z),
                              pointer<const void>(targets), pointer<const void>(shift),
                              pointer<double>(loss), pointer<void>(dz), on(cuda));
}

cuda::Error coef_expanded(const std::string& plan, Size classes, Size width, Address hidden,
                          Address targets, Address weights, Address loss, Address dweights,
                          Address dhidden, Address workspace, Address cuda) {
  return cuda::coef_expanded(struct_of<CoefPlan>(plan), classes, width, pointer<const void>(hidden),
                             pointer<const void>(targets), pointer<const void>(weights),
                             pointer<double>(loss), pointer<void>(dweights), pointer<void>(dhidden),
                             pointer<void>(workspace), on(cuda));
}

Size clip_workspace(const std::string& plan, int type, Address tasks, Size count, Size chunks,
                    Size columns) {
  return cuda::clip_workspace(struct_of<ClipPlan>(plan), static_cast<GradType>(type),
                              table_of(tasks, count, chunks, columns));
}

cuda::Error clip_sum(const std::string& plan, int type, Address tasks, Size count, Size chunks,
                     Size columns, Address bounds, Address norms, Address workspace, Address cuda) {
  return cuda::clip_sum(struct_of<ClipPlan>(plan), static_cast<GradType>(type),
                        table_of(tasks, count, chunks, columns), pointer<const ClipBound>(bounds),
                        pointer<double>(norms), pointer<void>(workspace), on(cuda));
}

Size explicit_norm_workspace(Address tasks, Size count, Size chunks, Size columns, Size batch) {
  return cuda::explicit_norm_workspace(table_of(tasks, count, chunks, columns), batch);
}

cuda::Error explicit_norm(Address tasks, Size count, Size chunks, Size columns, bool wide,
                          Size batch, Address squares, Address workspace, Address cuda) {
  return cuda::explicit_norm(table_of(tasks, count, chunks, columns), wide, batch,
                             pointer<double>(squares), pointer<void>(workspace), on(cuda));
}

cuda::Error clip_factors(Address squares, Size count, Size batch, const std::string& rule,
                         bool wide, Address norms, Address factors, Address cuda) {
  return cuda::clip_factors(pointer<const double* const>(squares), count, batch,
                            struct_of<ClipRule>(rule), wide, pointer<double>(norms),
                            pointer<void>(factors), on(cuda));
}

Size contract_workspace(Address tasks, Size count, Size chunks, Size columns, bool wide,
                        Size batch) {
  return cuda::contract_workspace(table_of(tasks, count, chunks, columns), wide, batch);
}

cuda::Error contract(Address tasks, Size count, Size chunks, Size columns, Address factors,
                     bool wide, Size batch, Address workspace, Address cuda) {
  return cuda::contract(table_of(tasks, count, chunks, columns), pointer<const void>(factors), wide,
                        batch, pointer<void>(workspace), on(cuda));
}

py::tuple device_count() {
  int count = 0;
  const cuda::Error error = cuda::device_count(&count);
  return py::make_tuple(count, error);
}

#define DPK_FIELD(Struct, name) fields[#name] = offsetof(Struct, name)

// Size and the offsets of all fields, by the struct's name.
py::dict layouts() {
  py::dict all;
  py::dict fields;
  const auto done = [&](const char* name, std::size_t size) {
    all[name] = py::make_tuple(size, fields);
    fields = py::dict();
  };
  DPK_FIELD(Stream, key);
  DPK_FIELD(Stream, n0);
  DPK_FIELD(Stream, n1);
  DPK_FIELD(Stream, rounds);
  done("Stream", sizeof(Stream));
  DPK_FIELD(Lies, keep);
  DPK_FIELD(Lies, width);
  DPK_FIELD(Lies, reciprocal);
  DPK_FIELD(Lies, categories);
  done("Lies", sizeof(Lies));
  DPK_FIELD(CoefPlan, stream);
  DPK_FIELD(CoefPlan, rounding);
  DPK_FIELD(CoefPlan, linear);
  DPK_FIELD(CoefPlan, quadratic);
  DPK_FIELD(CoefPlan, draws);
  DPK_FIELD(CoefPlan, rounding_bits);
  DPK_FIELD(CoefPlan, linear_at);
  DPK_FIELD(CoefPlan, quadratic_at);
  DPK_FIELD(CoefPlan, per_units);
  DPK_FIELD(CoefPlan, cells);
  DPK_FIELD(CoefPlan, per_unit);
  DPK_FIELD(CoefPlan, cell);
  DPK_FIELD(CoefPlan, rows);
  DPK_FIELD(CoefPlan, columns);
  DPK_FIELD(CoefPlan, noise);
  DPK_FIELD(CoefPlan, form);
  DPK_FIELD(CoefPlan, wide);
  DPK_FIELD(CoefPlan, aligned16);
  done("CoefPlan", sizeof(CoefPlan));
  DPK_FIELD(RowTask, rows);
  DPK_FIELD(RowTask, sum);
  DPK_FIELD(RowTask, columns);
  DPK_FIELD(RowTask, first_chunk);
  DPK_FIELD(RowTask, first_column);
  done("RowTask", sizeof(RowTask));
  DPK_FIELD(ClipBound, max_norm);
  DPK_FIELD(ClipBound, per_unit);
  DPK_FIELD(ClipBound, unit_bound);
  done("ClipBound", sizeof(ClipBound));
  DPK_FIELD(ClipPlan, rows);
  DPK_FIELD(ClipPlan, p);
  DPK_FIELD(ClipPlan, style);
  DPK_FIELD(ClipPlan, arithmetic);
  done("ClipPlan", sizeof(ClipPlan));
  DPK_FIELD(ClipRule, max_norm);
  DPK_FIELD(ClipRule, scale);
  DPK_FIELD(ClipRule, automatic);
  done("ClipRule", sizeof(ClipRule));
  DPK_FIELD(RuleNumbers, form);
  DPK_FIELD(RuleNumbers, first_step);
  DPK_FIELD(RuleNumbers, lr);
  DPK_FIELD(RuleNumbers, decay);
  DPK_FIELD(RuleNumbers, momentum);
  DPK_FIELD(RuleNumbers, fresh);
  DPK_FIELD(RuleNumbers, shrink);
  DPK_FIELD(RuleNumbers, fresh1);
  DPK_FIELD(RuleNumbers, keep2);
  DPK_FIELD(RuleNumbers, fresh2);
  DPK_FIELD(RuleNumbers, eps);
  DPK_FIELD(RuleNumbers, root2);
  DPK_FIELD(RuleNumbers, step);
  done("RuleNumbers", sizeof(RuleNumbers));
  DPK_FIELD(UpdateTask, param);
  DPK_FIELD(UpdateTask, sum);
  DPK_FIELD(UpdateTask, state1);
  DPK_FIELD(UpdateTask, state2);
  DPK_FIELD(UpdateTask, size);
  DPK_FIELD(UpdateTask, first_position);
  DPK_FIELD(UpdateTask, first_piece);
  DPK_FIELD(UpdateTask, draws_at);
  DPK_FIELD(UpdateTask, per_unit);
  DPK_FIELD(UpdateTask, step);
  DPK_FIELD(UpdateTask, aligned16);
  done("UpdateTask", sizeof(UpdateTask));
  DPK_FIELD(UpdateClock, step);
  DPK_FIELD(UpdateClock, beta1_power);
  DPK_FIELD(UpdateClock, beta2_power);
  done("UpdateClock", sizeof(UpdateClock));
  DPK_FIELD(UpdatePlan, rule);
  DPK_FIELD(UpdatePlan, stream);
  DPK_FIELD(UpdatePlan, rounding);
  DPK_FIELD(UpdatePlan, draws);
  DPK_FIELD(UpdatePlan, rounding_bits);
  DPK_FIELD(UpdatePlan, clock);
  DPK_FIELD(UpdatePlan, tasks);
  DPK_FIELD(UpdatePlan, pieces);
  DPK_FIELD(UpdatePlan, noise);
  DPK_FIELD(UpdatePlan, law);
  DPK_FIELD(UpdatePlan, sum_type);
  DPK_FIELD(UpdatePlan, wide);
  done("UpdatePlan", sizeof(UpdatePlan));
  return all;
}

py::dict constants() {
  py::dict values;
  values["tile"] = kTile;
  values["chunk"] = kChunk;
  values["update_piece"] = kUpdatePiece;
  return values;
}

}  // namespace

void add_cuda(py::module_& m) {
  m.def("layouts", &layouts);
  m.def("constants", &constants);
  m.def("device_count", &device_count);
  m.def("error_text", &cuda::error_text);
  m.def("preload", &cuda::preload, Free());
  m.def("keystream", &keystream, Free());
  m.def("lattice_draws", &lattice_draws, Free());
  m.def("rounding_bits", &rounding_bits, Free());
  m.def("add_noise", &add_noise, Free());
  m.def("update_step", &update_step, Free());
  m.def("advance", &advance, Free());
  m.def("randomize_symbols", &randomize_symbols, Free());
  m.def("coef_perturb", &coef_perturb, Free());
  m.def("coef_quadratic", &coef_quadratic, Free());
  m.def("coef_expanded_workspace", &cuda::coef_expanded_workspace);
  m.def("coef_expanded", &coef_expanded, Free());
  m.def("clip_workspace", &clip_workspace);
  m.def("clip_sum", &clip_sum, Free());
  m.def("explicit_norm_workspace", &explicit_norm_workspace);
  m.def("explicit_norm", &explicit_norm, Free());
  m.def("clip_factors", &clip_factors, Free());
  m.def("contract_workspace", &contract_workspace);
  m.def("contract", &contract, Free());
}

}  // namespace dpkern::bindings
