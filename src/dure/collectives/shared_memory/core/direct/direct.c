/* core_all_reduce for Python without ctypes, whose conversions take longer than the sum of four kilobytes. Built where
 * Python's headers are; where they are not, ctypes calls the same function. */
#define Py_LIMITED_API 0x030A0000
#include <Python.h>

#include <stdint.h>

typedef int reduce_function(void *core, int code, int root, uint64_t count, char *tensor);

/* all_reduce(function, core, code, count, address): the addresses as integers; returns a status. */
static PyObject *all_reduce(PyObject *module, PyObject *const *arguments, Py_ssize_t n) {
    (void)module;
    if (n != 5) {
        PyErr_SetString(PyExc_TypeError, "all_reduce takes five integers");
        return NULL;
    }
    reduce_function *reduce = (reduce_function *)(uintptr_t)PyLong_AsUnsignedLongLong(arguments[0]);
    void *core = (void *)(uintptr_t)PyLong_AsUnsignedLongLong(arguments[1]);
    int code = (int)PyLong_AsLong(arguments[2]);
    uint64_t count = PyLong_AsUnsignedLongLong(arguments[3]);
    char *tensor = (char *)(uintptr_t)PyLong_AsUnsignedLongLong(arguments[4]);
    if (PyErr_Occurred()) return NULL;
    int status;
    /* It may wait for peers, and its tick takes the GIL again. */
    Py_BEGIN_ALLOW_THREADS
    status = reduce(core, code, -1, count, tensor);
    Py_END_ALLOW_THREADS
    return PyLong_FromLong(status);
}

static PyMethodDef methods[] = {
    {"all_reduce", (PyCFunction)(void (*)(void))all_reduce, METH_FASTCALL, "The reduction over all ranks, in place."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_direct", "A short way into the C core.", -1, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__direct(void) { return PyModule_Create(&definition); }
