// What a forward pass must find and leave as it was, in two calls: one before it and one after.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <vector>

#include "bindings/bindings.h"
#include "bindings/tables.h"

namespace py = pybind11;

namespace dpkern::bindings {
namespace {

// Python 3.11 gives every dict another number with each change (PEP 509); later versions do not.
#if PY_VERSION_HEX < 0x030C0000
std::uint64_t change_of(PyObject* table) {
  return reinterpret_cast<const PyDictObject*>(table)->ma_version_tag;
}
#else
std::uint64_t change_of(PyObject*) { return 0; }
#endif

// Tables that hold the same objects; each of the entries is a tuple.
class Tables {
 public:
  Tables(py::list tables, py::list entries)
      : tables_(std::move(tables)), entries_(std::move(entries)), changes_(tables_.size()) {
    if (entries_.size() != tables_.size()) throw py::value_error("lists of other lengths");
  }

  bool same() {
    for (std::size_t i = 0; i < changes_.size(); ++i) {
      PyObject* const table = PyList_GET_ITEM(tables_.ptr(), static_cast<Py_ssize_t>(i));
      // The order of an OrderedDict is none of the dict's, and changes by itself.
      const std::uint64_t change = PyDict_CheckExact(table) ? change_of(table) : 0;
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

// An attribute of many tensors, by its descriptor. Private parameters must be ordinary here
// (``without_torch_function``).
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
           const py::object& is_trained, const py::object& version)
      : everywhere_{everywhere, everything},
        of_tensors_{tables, entries},
        parameters_(std::move(parameters)),
        trained_(std::move(trained)),
        tensors_(std::move(tensors)),
        steady_(std::move(steady)),
        versions_(std::move(versions)),
        is_trained_(is_trained),
        version_(version) {
    if (trained_.size() != parameters_.size() || steady_.size() != tensors_.size() ||
        versions_.size() != tensors_.size()) {
      throw py::value_error("lists of other lengths");
    }
  }

  // Whether a pass may begin: all tables and flags are as they were, and steady tensors have not
  // been written to. Versions are noted for `after`.
  bool before() {
    for (std::size_t i = 0; i < trained_.size(); ++i) {
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
    const bool same = of_tensors_.same() && read(false);
    return same || failed();
  }

  // As `before` has noted them last.
  const std::vector<std::int64_t>& versions() const { return versions_; }

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
    for (std::size_t i = 0; i < versions_.size(); ++i) {
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
};

}  // namespace

void add_pass_look(py::module_& m) {
  py::class_<PassLook>(m, "PassLook")
      .def(py::init<py::list, py::list, py::list, std::vector<bool>, py::list, py::list, py::list,
                    std::vector<bool>, std::vector<std::int64_t>, py::object, py::object>())
      .def("before", &PassLook::before)
      .def("after", &PassLook::after)
      .def("versions", &PassLook::versions);
}

}  // namespace dpkern::bindings
