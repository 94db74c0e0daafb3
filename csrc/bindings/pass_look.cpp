// What a forward pass must find and leave as it was, in two calls: one before it and one after.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/held.h"
#include "bindings/ordinary.h"
#include "bindings/tables.h"

namespace py = pybind11;

namespace dpkern::bindings {
namespace {

// A step has taken most of what is looked at out of the near caches, so that each first touch waits
// for a far one: objects are asked for some places ahead.
class Ahead {
 public:
  explicit Ahead(const py::list& objects)
      : objects_(objects), size_(PyList_GET_SIZE(objects.ptr())) {
    while (next_ < size_ && next_ < kDistance) ask();
  }
  void step() {
    if (next_ < size_) ask();
  }

 private:
  static constexpr Py_ssize_t kDistance = 16;
  static constexpr int kHalf = 32;  // of a line: the heads of dicts may reach into a second one
  void ask() {
    const auto* const head =
        reinterpret_cast<const char*>(PyList_GET_ITEM(objects_.ptr(), next_++));
    __builtin_prefetch(head);
    __builtin_prefetch(head + kHalf);
  }
  const py::list& objects_;
  Py_ssize_t size_, next_ = 0;
};

// Tables that hold the same objects; each of the entries is a tuple.
class Tables {
 public:
  Tables(py::list tables, py::list entries)
      : tables_(std::move(tables)), entries_(std::move(entries)), changes_(tables_.size()) {
    if (entries_.size() != tables_.size()) throw py::value_error("lists of other lengths");
  }

  int visit(visitproc visit, void* arg) const {
    Py_VISIT(tables_.ptr());
    Py_VISIT(entries_.ptr());
    return 0;
  }

  bool same() {
    Ahead ahead(tables_);
    for (std::size_t i = 0; i < changes_.size(); ++i, ahead.step()) {
      PyObject* const table = PyList_GET_ITEM(tables_.ptr(), static_cast<Py_ssize_t>(i));
      // The order of an OrderedDict is none of the dict's, and changes by itself.
      const bool ordered = !PyDict_CheckExact(table) && PyDict_GET_SIZE(table) > 1;
      const std::uint64_t change = ordered ? 0 : change_of(table);
      if (change != 0 && change == changes_[i]) continue;
      if (!holds(table, PyList_GET_ITEM(entries_.ptr(), static_cast<Py_ssize_t>(i)))) return false;
      changes_[i] = change;
    }
    return true;
  }

 private:
  py::list tables_, entries_;
  std::vector<std::uint64_t> changes_;
};

// An attribute of many tensors, by its descriptor. Private parameters must be ordinary here.
class Attribute {
 public:
  explicit Attribute(py::object descriptor) : descriptor_(std::move(descriptor)) {
    get_ = Py_TYPE(descriptor_.ptr())->tp_descr_get;
    if (get_ == nullptr) throw py::type_error("not a descriptor");
  }
  // A new reference; none with an error.
  py::object of(PyObject* object) const {
    return py::reinterpret_steal<py::object>(
        get_(descriptor_.ptr(), object, reinterpret_cast<PyObject*>(Py_TYPE(object))));
  }

 private:
  py::object descriptor_;
  descrgetfunc get_;
};

class PassLook {
 public:
  PassLook(const py::list& everywhere, const py::list& everything, py::list parameters,
           std::vector<bool> trained, const py::list& tables, const py::list& entries,
           py::list tensors, std::vector<bool> steady, std::vector<std::int64_t> versions,
           const py::object& is_trained, const py::object& version, py::object context)
      : everywhere_{everywhere, everything},
        of_tensors_{tables, entries},
        parameters_(std::move(parameters)),
        trained_(std::move(trained)),
        tensors_(std::move(tensors)),
        steady_(std::move(steady)),
        versions_(std::move(versions)),
        is_trained_(is_trained),
        version_(version),
        context_(std::move(context)) {
    if (trained_.size() != parameters_.size() || steady_.size() != tensors_.size() ||
        versions_.size() != tensors_.size()) {
      throw py::value_error("lists of other lengths");
    }
  }

  // Whether a pass may begin: all tables and flags are as they were, and steady tensors have not
  // been written to. Versions are noted for `after`.
  bool before() {
    const Ordinary ordinary(context_.ptr());
    if (!ordinary.entered()) return failed();
    Ahead ahead(parameters_);
    for (std::size_t i = 0; i < trained_.size(); ++i, ahead.step()) {
      const py::object flag = is_trained_.of(at(parameters_, i));
      if (!flag) return failed();
      if ((flag.ptr() == Py_True) != trained_[i]) return false;
    }
    if (!everywhere_.same() || !read(true)) return failed();
    versions_.swap(read_);
    return true;
  }

  // Whether the pass has left the tables of tensors as they were, and written to none of these.
  bool after() {
    const Ordinary ordinary(context_.ptr());
    const bool same = ordinary.entered() && of_tensors_.same() && read(false);
    return same || failed();
  }

  // As `before` has noted them last.
  const std::vector<std::int64_t>& versions() const { return versions_; }

  int visit(visitproc visit, void* arg) const {
    for (const Tables* tables : {&everywhere_, &of_tensors_}) {
      const int stopped = tables->visit(visit, arg);
      if (stopped != 0) return stopped;
    }
    Py_VISIT(parameters_.ptr());
    Py_VISIT(tensors_.ptr());
    Py_VISIT(context_.ptr());
    return 0;
  }

 private:
  static PyObject* at(const py::list& list, std::size_t i) {
    return PyList_GET_ITEM(list.ptr(), static_cast<Py_ssize_t>(i));
  }

  // What raises is left to Python, which looks again.
  static bool failed() {
    PyErr_Clear();
    return false;
  }

  // Read versions; false where one has changed, of steady tensors or of any.
  bool read(bool steady) {
    read_.resize(versions_.size());
    Ahead ahead(tensors_);
    for (std::size_t i = 0; i < versions_.size(); ++i, ahead.step()) {
      const py::object found = version_.of(at(tensors_, i));
      if (!found) return false;
      read_[i] = PyLong_AsLongLong(found.ptr());
      if (read_[i] != versions_[i] && (!steady || steady_[i])) return false;
    }
    return PyErr_Occurred() == nullptr;
  }

  Tables everywhere_, of_tensors_;
  py::list parameters_;
  std::vector<bool> trained_;
  py::list tensors_;
  std::vector<bool> steady_;
  std::vector<std::int64_t> versions_, read_;
  Attribute is_trained_, version_;
  py::object context_;
};

using HeldPass = Held<PassLook>;

PyObject* before(PyObject* self, PyObject*) {
  return PyBool_FromLong(HeldPass::of(self)->before());
}

PyObject* after(PyObject* self, PyObject*) { return PyBool_FromLong(HeldPass::of(self)->after()); }

PyObject* versions(PyObject* self, PyObject*) {
  const std::vector<std::int64_t>& known = HeldPass::of(self)->versions();
  PyObject* made = PyList_New(static_cast<Py_ssize_t>(known.size()));
  for (std::size_t i = 0; made != nullptr && i < known.size(); ++i) {
    PyObject* const number = PyLong_FromLongLong(known[i]);
    PyList_SET_ITEM(made, static_cast<Py_ssize_t>(i), number);
    if (number == nullptr) Py_CLEAR(made);
  }
  return made;
}

PyTypeObject* type_of_passes() {
  static PyMethodDef methods[] = {
      {"before", &before, METH_NOARGS, "before(): whether all is as the last pass has left it."},
      {"after", &after, METH_NOARGS, "after(): whether the pass has left all tensors alone."},
      {"versions", &versions, METH_NOARGS, "versions(): those that before() has seen last."},
      {nullptr, nullptr, 0, nullptr}};
  return HeldPass::type("dpkern._C.PassLookObject", methods);
}

py::object make_pass(const py::list& everywhere, const py::list& everything, py::list parameters,
                     std::vector<bool> trained, const py::list& tables, const py::list& entries,
                     py::list tensors, std::vector<bool> steady, std::vector<std::int64_t> known,
                     const py::object& is_trained, const py::object& version, py::object context) {
  auto look =
      std::make_unique<PassLook>(everywhere, everything, std::move(parameters), std::move(trained),
                                 tables, entries, std::move(tensors), std::move(steady),
                                 std::move(known), is_trained, version, std::move(context));
  return HeldPass::make(type_of_passes(), std::move(look));
}

}  // namespace

void add_pass_look(py::module_& m) { m.def("PassLook", &make_pass); }

}  // namespace dpkern::bindings
