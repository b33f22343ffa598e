// Python tuples out of native results: what an interpreter keeps and compares as it is.
#pragma once
#include <nanobind/nanobind.h>

#include <cstddef>

namespace forerun {

// (value(0), ..., value(size - 1)) as a tuple.
template <class F>
nanobind::tuple tuple_of(size_t size, F value) {
  PyObject* out = PyTuple_New(static_cast<Py_ssize_t>(size));
  if (!out) nanobind::raise_python_error();
  for (size_t i = 0; i < size; i++)
    PyTuple_SetItem(out, static_cast<Py_ssize_t>(i), nanobind::cast(value(i)).release().ptr());
  return nanobind::steal<nanobind::tuple>(out);
}

}  // namespace forerun
