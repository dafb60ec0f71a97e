/* Launches of compiled kernels, callable from Python at the price of a C function.
 *
 *   - Launch: one launch of one kernel, a function of the kernel's pointers as integers.
 *   - Entry: launches in order, a function of the public function's arguments. Compares them with those that it was
 *     made for, and returns MISS, the allocated outputs, or None when the kernels work in place. Its launches choose
 *     their pointers from one table: what the entry allocates (outputs first, then scratch), then the arguments.
 * Everything that does not change between calls is laid out when the object is made, and never written again, so
 * objects may be shared between threads. They hold no tensor and nothing that refers back to them, so reference
 * counts are enough and the garbage collector need not know them.
 *
 * Python's side (native.py) finds the two offsets, makes sure that the layouts assumed here hold in this process, and
 * falls back to Triton's own launcher where they do not. cuda.h is the one that Triton brings.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <dlfcn.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include "cuda.h"

#ifdef Py_GIL_DISABLED
#error "the checks rely on the interpreter lock"
#endif

#define MAX_PARAMS 64
#define MAX_TENSORS 64
#define MAX_ALLOCATIONS 16
#define ALIGNMENT 16

/* --- DLPack's C exchange interface, major version 1: the layouts that dlpack.h promises to keep. */

enum { DL_CUDA = 2 };
typedef struct { int32_t type, id; } DLDevice;
typedef struct { uint8_t code, bits; uint16_t lanes; } DLDataType;
typedef struct {
    void *data;
    DLDevice device;
    int32_t ndim;
    DLDataType dtype;
    int64_t *shape, *strides;
    uint64_t byte_offset;
} DLTensor;
typedef struct Exchange {
    struct { uint32_t major, minor; } version;
    struct Exchange *older;
    void *allocate, *managed_from_python, *managed_to_python;
    int (*tensor_from_python)(void *object, DLTensor *out); /* borrows: shape and strides stay the tensor's own */
    int (*current_work_stream)(int32_t device_type, int32_t device, void **out);
} Exchange;

/* --- What this thread's dispatcher is told to do (modes, functorch, inference mode, autocast), and gradients.
 * C++ symbols of libc10; where one is missing, loading this module fails. */

typedef struct { uint64_t included, excluded; } LocalKeys;
extern __thread LocalKeys local_keys __asm__("_ZN3c104impl26raw_local_dispatch_key_setE");
extern bool records_gradients(void) __asm__("_ZN3c108GradMode10is_enabledEv");

/* --- Set once by setup(). */

static const Exchange *exchange;
static Py_ssize_t impl_offset; /* in a tensor object: the pointer to its TensorImpl */
static Py_ssize_t keys_offset; /* in a TensorImpl: its set of dispatch keys */
static PyObject *miss;
static PyObject *str_enter, *str_leave, *str_requires_grad;
static CUresult (*launch_kernel)(const CUlaunchConfig *, CUfunction, void **, void **);
static CUresult (*error_string)(CUresult, const char **);
static CUresult (*param_info)(CUfunction, size_t, size_t *, size_t *);

/* --- The objects. */

typedef struct {
    PyTypeObject *type; /* NULL: the argument is None */
    uint64_t keys;      /* dispatch keys: device kind, conj and neg bits, functorch wrappers, inference tensors, ... */
    DLDevice device;
    DLDataType dtype;
    int32_t ndim;
    int64_t *sizes; /* then as many strides */
} Signature;

typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    /* the launch */
    CUfunction function;
    unsigned grid[3], threads, shared_bytes;
    CUlaunchAttribute attributes[3];
    unsigned attribute_count;
    int device;
    Py_ssize_t param_count, pointer_count;
    uint64_t params[MAX_PARAMS];   /* values in the low bytes; pointers and Triton's scratch are 0 */
    uint8_t pointers[MAX_PARAMS];  /* which parameters are pointers */
    uint64_t aligned[MAX_PARAMS];  /* per pointer: the address bits that must be 0 */
    /* when to take the slow launcher instead (Triton's, for its kernels): borrowed from `held` */
    PyObject *slow, *runtime, *enter, *leave, *enter_calls, *leave_calls, *current_device, *name;
    PyObject *held;
} Launch;

typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    Py_ssize_t argument_count, scalar_count, allocation_count, output_count, step_count;
    LocalKeys local;
    Signature *signatures;
    PyObject *scalars;
    PyObject *allocations; /* (function or None, its arguments, function without arguments for any device) each */
    PyObject *steps;       /* (Launch, for each of its pointers the place in the table, as bytes) each */
} Entry;

static void launch_dealloc(Launch *self)
{
    Py_XDECREF(self->held);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static void entry_dealloc(Entry *self)
{
    for (Py_ssize_t i = 0; self->signatures != NULL && i < self->argument_count; i++) {
        Py_XDECREF(self->signatures[i].type);
        PyMem_Free(self->signatures[i].sizes);
    }
    PyMem_Free(self->signatures);
    Py_XDECREF(self->scalars);
    Py_XDECREF(self->allocations);
    Py_XDECREF(self->steps);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

/* --- Launching. All int functions: 1 yes, 0 no (or done), -1 with an exception set. */

static int on_other_device(Launch *self)
{
    if (self->current_device == Py_None)
        return 0; /* there is only one */
    PyObject *current = PyObject_CallNoArgs(self->current_device);
    if (current == NULL)
        return -1;
    long index = PyLong_AsLong(current);
    Py_DECREF(current);
    return index == -1 && PyErr_Occurred() ? -1 : index != self->device;
}

/* Profilers add theirs to the chain that `knobs.runtime` holds, or put another object in its place. */
static int is_hooked(Launch *self)
{
    if (self->runtime == Py_None)
        return 0; /* no kernel of Triton's */
    if (PyList_GET_SIZE(self->enter_calls) || PyList_GET_SIZE(self->leave_calls))
        return 1;
    PyObject *enter = PyObject_GetAttr(self->runtime, str_enter);
    PyObject *leave = enter ? PyObject_GetAttr(self->runtime, str_leave) : NULL;
    int hooked = leave == NULL ? -1 : enter != self->enter || leave != self->leave;
    Py_XDECREF(enter);
    Py_XDECREF(leave);
    return hooked;
}

static int launch_slowly(Launch *self, const uint64_t *pointers)
{
    PyObject *given[MAX_PARAMS] = {NULL};
    Py_ssize_t count = 0;
    while (count < self->pointer_count && (given[count] = PyLong_FromUnsignedLongLong(pointers[count])) != NULL)
        count++;
    PyObject *result = count == self->pointer_count ? PyObject_Vectorcall(self->slow, given, count, NULL) : NULL;
    while (count > 0)
        Py_DECREF(given[--count]);
    Py_XDECREF(result);
    return result == NULL ? -1 : 0;
}

static int launch(Launch *self, const uint64_t *pointers, int elsewhere)
{
    uint64_t values[MAX_PARAMS], misaligned = 0;
    void *params[MAX_PARAMS];
    memcpy(values, self->params, self->param_count * sizeof(uint64_t));
    for (Py_ssize_t i = 0; i < self->pointer_count; i++) {
        misaligned |= pointers[i] & self->aligned[i];
        values[self->pointers[i]] = pointers[i];
    }
    int slow = elsewhere || misaligned ? 1 : is_hooked(self);
    if (slow)
        return slow < 0 ? -1 : launch_slowly(self, pointers);
    if (self->grid[0] == 0 || self->grid[1] == 0 || self->grid[2] == 0)
        return 0; /* the driver calls an empty grid an error, Triton does not */
    for (Py_ssize_t i = 0; i < self->param_count; i++)
        params[i] = &values[i];
    void *stream = NULL;
    if (exchange->current_work_stream(DL_CUDA, self->device, &stream) != 0)
        return -1;
    CUlaunchConfig config = {
        .gridDimX = self->grid[0], .gridDimY = self->grid[1], .gridDimZ = self->grid[2],
        .blockDimX = self->threads, .blockDimY = 1, .blockDimZ = 1,
        .sharedMemBytes = self->shared_bytes, .hStream = (CUstream)stream,
        .attrs = self->attributes, .numAttrs = self->attribute_count,
    };
    CUresult code;
    Py_BEGIN_ALLOW_THREADS /* the driver blocks while its queue is full */
    code = launch_kernel(&config, self->function, params, NULL);
    Py_END_ALLOW_THREADS
    if (code == CUDA_SUCCESS)
        return 0;
    if (code == CUDA_ERROR_INVALID_CONTEXT)
        return launch_slowly(self, pointers); /* a thread without a context yet: the slow launcher makes one current */
    const char *text = NULL;
    error_string(code, &text);
    PyErr_Format(PyExc_RuntimeError, "launch of %U: CUDA error %d: %s", self->name, (int)code, text ? text : "unknown");
    return -1;
}

static int takes(Launch *self, Py_ssize_t expected, size_t nargsf, PyObject *keywords)
{
    bool named = keywords != NULL && PyTuple_GET_SIZE(keywords) != 0;
    if (!named && PyVectorcall_NARGS(nargsf) == expected)
        return 1;
    PyErr_Format(PyExc_TypeError, "launch of %U: expected %zd positional arguments, got %zd%s", self->name, expected,
                 PyVectorcall_NARGS(nargsf), named ? " and keywords" : "");
    return 0;
}

static PyObject *call_addresses(PyObject *callable, PyObject *const *args, size_t nargsf, PyObject *keywords)
{
    Launch *self = (Launch *)callable;
    uint64_t pointers[MAX_PARAMS];
    if (!takes(self, self->pointer_count, nargsf, keywords))
        return NULL;
    for (Py_ssize_t i = 0; i < self->pointer_count; i++) {
        pointers[i] = PyLong_AsUnsignedLongLong(args[i]);
        if (pointers[i] == (uint64_t)-1 && PyErr_Occurred())
            return NULL;
    }
    int elsewhere = on_other_device(self);
    if (elsewhere < 0 || launch(self, pointers, elsewhere) < 0)
        return NULL;
    Py_RETURN_NONE;
}

/* --- Arguments. */

static uint64_t dispatch_keys(PyObject *tensor)
{
    const char *impl = *(const char **)((const char *)tensor + impl_offset);
    uint64_t keys;
    memcpy(&keys, impl + keys_offset, sizeof keys);
    return keys;
}

/* Whether the tensor is like the one recorded; sets its address. */
static int fits(const Signature *expected, PyObject *argument, bool grad, uint64_t *address)
{
    if (Py_TYPE(argument) != expected->type || dispatch_keys(argument) != expected->keys)
        return 0;
    if (grad) {
        PyObject *requires = PyObject_GetAttr(argument, str_requires_grad);
        if (requires == NULL)
            return -1;
        Py_DECREF(requires);
        if (requires != Py_False)
            return 0;
    }
    DLTensor seen;
    if (exchange->tensor_from_python(argument, &seen) != 0) {
        PyErr_Clear(); /* without data: the way behind MISS says what is wrong */
        return 0;
    }
    size_t bytes = expected->ndim * sizeof(int64_t);
    if (seen.ndim != expected->ndim || memcmp(&seen.dtype, &expected->dtype, sizeof seen.dtype) ||
        memcmp(&seen.device, &expected->device, sizeof seen.device) || memcmp(seen.shape, expected->sizes, bytes) ||
        memcmp(seen.strides, expected->sizes + expected->ndim, bytes))
        return 0;
    *address = (uint64_t)seen.data + seen.byte_offset;
    return 1;
}

static int matches(Entry *self, PyObject *const *args, uint64_t *pointers)
{
    if (memcmp(&local_keys, &self->local, sizeof local_keys))
        return 0;
    bool grad = records_gradients();
    for (Py_ssize_t i = 0; i < self->argument_count; i++) {
        if (self->signatures[i].type != NULL) {
            int fit = fits(&self->signatures[i], args[i], grad, pointers++);
            if (fit <= 0)
                return fit;
        } else if (args[i] != Py_None) {
            return 0;
        }
    }
    for (Py_ssize_t i = 0; i < self->scalar_count; i++) {
        PyObject *given = args[self->argument_count + i], *expected = PyTuple_GET_ITEM(self->scalars, i);
        if (given == expected)
            continue;
        int same = PyObject_RichCompareBool(given, expected, Py_EQ);
        if (same <= 0)
            return same;
    }
    return 1;
}

static PyObject *allocate(PyObject *allocation, int elsewhere)
{
    PyObject *function = PyTuple_GET_ITEM(allocation, 0);
    if (function == Py_None || elsewhere) /* `function` allocates on the current device */
        return PyObject_CallNoArgs(PyTuple_GET_ITEM(allocation, 2));
    return PyObject_Call(function, PyTuple_GET_ITEM(allocation, 1), NULL);
}

static Launch *step_launch(Entry *self, Py_ssize_t step)
{
    return (Launch *)PyTuple_GET_ITEM(PyTuple_GET_ITEM(self->steps, step), 0);
}

static int launch_all(Entry *self, const uint64_t *table, int elsewhere)
{
    for (Py_ssize_t i = 0; i < self->step_count; i++) {
        uint64_t pointers[MAX_PARAMS];
        Launch *step = step_launch(self, i);
        const uint8_t *places = (const uint8_t *)PyBytes_AS_STRING(PyTuple_GET_ITEM(PyTuple_GET_ITEM(self->steps, i), 1));
        for (Py_ssize_t j = 0; j < step->pointer_count; j++)
            pointers[j] = table[places[j]];
        if (launch(step, pointers, elsewhere) < 0)
            return -1;
    }
    return 0;
}

static PyObject *call_entry(PyObject *callable, PyObject *const *args, size_t nargsf, PyObject *keywords)
{
    Entry *self = (Entry *)callable;
    uint64_t table[MAX_TENSORS];
    PyObject *made[MAX_ALLOCATIONS], *result = NULL;
    Py_ssize_t count = 0;
    if (!takes(step_launch(self, 0), self->argument_count + self->scalar_count, nargsf, keywords))
        return NULL;
    int match = matches(self, args, table + self->allocation_count);
    if (match <= 0)
        return match < 0 ? NULL : Py_NewRef(miss);
    int elsewhere = on_other_device(step_launch(self, 0));
    if (elsewhere < 0)
        return NULL;
    while (count < self->allocation_count) {
        DLTensor seen;
        if ((made[count] = allocate(PyTuple_GET_ITEM(self->allocations, count), elsewhere)) == NULL)
            goto done;
        count++;
        if (exchange->tensor_from_python(made[count - 1], &seen) != 0)
            goto done;
        table[count - 1] = (uint64_t)seen.data + seen.byte_offset;
    }
    if (launch_all(self, table, elsewhere) < 0)
        goto done;
    if (self->output_count == 0)
        result = Py_NewRef(Py_None);
    else if (self->output_count == 1)
        result = Py_NewRef(made[0]);
    else if ((result = PyTuple_New(self->output_count)) != NULL)
        for (Py_ssize_t i = 0; i < self->output_count; i++)
            PyTuple_SET_ITEM(result, i, Py_NewRef(made[i]));
done: /* scratch is the allocator's again: whatever gets it next on this stream runs behind the launches */
    while (count > 0)
        Py_DECREF(made[--count]);
    return result;
}

/* --- Making them. */

static PyTypeObject LaunchType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "kda_native.Launch",
    .tp_doc = "One launch of a compiled kernel: call it with addresses.",
    .tp_basicsize = sizeof(Launch),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_dealloc = (destructor)launch_dealloc,
    .tp_vectorcall_offset = offsetof(Launch, vectorcall),
    .tp_call = PyVectorcall_Call,
};

static PyTypeObject EntryType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "kda_native.Entry",
    .tp_doc = "Launches in order: call it with a public function's arguments.",
    .tp_basicsize = sizeof(Entry),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_dealloc = (destructor)entry_dealloc,
    .tp_vectorcall_offset = offsetof(Entry, vectorcall),
    .tp_call = PyVectorcall_Call,
};

/* The kernel's own idea of its parameters; were it another than `sizes` says, launching would read wild memory. */
static bool has_params(CUfunction function, const char *sizes, Py_ssize_t count)
{
    size_t offset, size;
    for (Py_ssize_t i = 0; i < count; i++)
        if (param_info(function, i, &offset, &size) != CUDA_SUCCESS || size != (size_t)sizes[i])
            return false;
    return param_info(function, count, &offset, &size) == CUDA_ERROR_INVALID_VALUE;
}

/* `described`: name, function, grid, threads, blocks of a cluster, shared bytes, dependent launch, cooperative, device,
 * values and sizes of the parameters, which of them are pointers, whether each of these must be aligned, slow, runtime
 * (None where there are no hooks), enter, leave, enter's calls, leave's calls, current_device (None where there is one
 * device). */
static int describe(Launch *self, PyObject *described)
{
    unsigned long long function;
    unsigned cluster;
    int dependent, cooperative;
    const char *values, *sizes, *pointers, *aligned;
    Py_ssize_t values_size, count, pointer_count, aligned_count;
    self->held = Py_NewRef(described);
    if (!PyArg_ParseTuple(described, "UK(III)IIIppiy#y#y#y#OOOOO!O!O:launch", &self->name, &function, &self->grid[0],
                          &self->grid[1], &self->grid[2], &self->threads, &cluster, &self->shared_bytes, &dependent,
                          &cooperative, &self->device, &values, &values_size, &sizes, &count, &pointers,
                          &pointer_count, &aligned, &aligned_count, &self->slow, &self->runtime, &self->enter,
                          &self->leave, &PyList_Type, &self->enter_calls, &PyList_Type, &self->leave_calls,
                          &self->current_device))
        return -1;
    self->function = (CUfunction)(uintptr_t)function;
    bool fit = count <= MAX_PARAMS && values_size == 8 * count && aligned_count == pointer_count;
    for (Py_ssize_t i = 0; fit && i < pointer_count; i++)
        fit = (uint8_t)pointers[i] < count;
    if (!fit || !has_params(self->function, sizes, count)) {
        PyErr_Format(PyExc_ValueError, "launch of %U: the kernel takes other parameters than described", self->name);
        return -1;
    }
    self->param_count = count;
    self->pointer_count = pointer_count;
    memcpy(self->params, values, values_size);
    memcpy(self->pointers, pointers, pointer_count);
    for (Py_ssize_t i = 0; i < pointer_count; i++)
        self->aligned[i] = aligned[i] ? ALIGNMENT - 1 : 0;
    const CUlaunchAttribute allow_dependent = {.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
                                               .value.programmaticStreamSerializationAllowed = 1};
    const CUlaunchAttribute all_resident = {.id = CU_LAUNCH_ATTRIBUTE_COOPERATIVE, .value.cooperative = 1};
    const CUlaunchAttribute in_clusters = {.id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION,
                                           .value.clusterDim = {.x = cluster, .y = 1, .z = 1}};
    if (dependent)
        self->attributes[self->attribute_count++] = allow_dependent;
    if (cooperative)
        self->attributes[self->attribute_count++] = all_resident;
    if (cluster > 1)
        self->attributes[self->attribute_count++] = in_clusters;
    return 0;
}

static int record(Signature *signature, PyObject *argument)
{
    DLTensor seen;
    if (argument == Py_None)
        return 0;
    if (exchange->tensor_from_python(argument, &seen) != 0)
        return -1;
    signature->type = (PyTypeObject *)Py_NewRef((PyObject *)Py_TYPE(argument));
    signature->keys = dispatch_keys(argument);
    signature->device = seen.device;
    signature->dtype = seen.dtype;
    signature->ndim = seen.ndim;
    if ((signature->sizes = PyMem_New(int64_t, 2 * seen.ndim + 1)) == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    memcpy(signature->sizes, seen.shape, seen.ndim * sizeof(int64_t));
    memcpy(signature->sizes + seen.ndim, seen.strides, seen.ndim * sizeof(int64_t));
    return 0;
}

/* Records the arguments; the number of tensors in the table, or -1. */
static Py_ssize_t record_all(Entry *self, PyObject *arguments)
{
    Py_ssize_t tensors = self->allocation_count;
    self->local = local_keys;
    self->signatures = PyMem_Calloc(self->argument_count + 1, sizeof(Signature));
    if (self->signatures == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < self->argument_count; i++) {
        if (record(&self->signatures[i], PyTuple_GET_ITEM(arguments, i)) < 0)
            return -1;
        tensors += self->signatures[i].type != NULL;
    }
    return tensors;
}

static bool is_step(PyObject *step, Py_ssize_t tensors)
{
    PyObject *launch, *places;
    if (!PyTuple_Check(step) || !PyArg_ParseTuple(step, "O!O!", &LaunchType, &launch, &PyBytes_Type, &places) ||
        PyBytes_GET_SIZE(places) != ((Launch *)launch)->pointer_count)
        return false;
    for (Py_ssize_t i = 0; i < PyBytes_GET_SIZE(places); i++)
        if ((uint8_t)PyBytes_AS_STRING(places)[i] >= tensors)
            return false;
    return true;
}

static bool is_allocation(PyObject *allocation)
{
    return PyTuple_Check(allocation) && PyTuple_GET_SIZE(allocation) == 3 &&
           (PyTuple_GET_ITEM(allocation, 0) == Py_None || PyTuple_Check(PyTuple_GET_ITEM(allocation, 1)));
}

/* bind(described): a launch as a function of addresses. */
static PyObject *bind(PyObject *module, PyObject *args)
{
    PyObject *described;
    if (!PyArg_ParseTuple(args, "O!:bind", &PyTuple_Type, &described))
        return NULL;
    Launch *self = (Launch *)LaunchType.tp_alloc(&LaunchType, 0); /* zeroed */
    if (self == NULL)
        return NULL;
    self->vectorcall = call_addresses;
    if (describe(self, described) < 0)
        Py_CLEAR(self);
    return (PyObject *)self;
}

/* entry(arguments, scalars, allocations, number of outputs, steps): launches as a function of arguments like these,
 * which are plain tensors, parameters and Nones (the caller has looked). */
static PyObject *entry(PyObject *module, PyObject *args)
{
    PyObject *arguments, *scalars, *allocations, *steps;
    Py_ssize_t outputs;
    if (!PyArg_ParseTuple(args, "O!O!O!nO!:entry", &PyTuple_Type, &arguments, &PyTuple_Type, &scalars, &PyTuple_Type,
                          &allocations, &outputs, &PyTuple_Type, &steps))
        return NULL;
    Entry *self = (Entry *)EntryType.tp_alloc(&EntryType, 0); /* zeroed */
    if (self == NULL)
        return NULL;
    self->vectorcall = call_entry;
    self->argument_count = PyTuple_GET_SIZE(arguments);
    self->scalar_count = PyTuple_GET_SIZE(scalars);
    self->allocation_count = PyTuple_GET_SIZE(allocations);
    self->output_count = outputs;
    self->step_count = PyTuple_GET_SIZE(steps);
    self->scalars = Py_NewRef(scalars);
    self->allocations = Py_NewRef(allocations);
    self->steps = Py_NewRef(steps);
    Py_ssize_t tensors = record_all(self, arguments);
    bool fit = tensors <= MAX_TENSORS && self->allocation_count <= MAX_ALLOCATIONS && self->step_count > 0 &&
               outputs >= 0 && outputs <= self->allocation_count;
    for (Py_ssize_t i = 0; fit && i < self->allocation_count; i++)
        fit = is_allocation(PyTuple_GET_ITEM(allocations, i));
    for (Py_ssize_t i = 0; fit && tensors >= 0 && i < self->step_count; i++)
        fit = is_step(PyTuple_GET_ITEM(steps, i), tensors);
    if (tensors >= 0 && fit)
        return (PyObject *)self;
    if (!PyErr_Occurred())
        PyErr_Format(PyExc_ValueError, "entry: its %zd launches do not fit its table of %zd tensors", self->step_count,
                     tensors);
    Py_DECREF(self);
    return NULL;
}

/* setup(capsule, impl_offset, keys_offset, MISS): what holds for the process. */
static PyObject *setup(PyObject *module, PyObject *args)
{
    PyObject *capsule;
    if (!PyArg_ParseTuple(args, "OnnO:setup", &capsule, &impl_offset, &keys_offset, &miss))
        return NULL;
    Py_INCREF(miss);
    exchange = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    if (exchange == NULL)
        return NULL;
    if (exchange->version.major != 1 || !exchange->tensor_from_python || !exchange->current_work_stream) {
        PyErr_Format(PyExc_ImportError, "expected version 1 of DLPack's C exchange interface, got %u.%u",
                     exchange->version.major, exchange->version.minor);
        return NULL;
    }
    void *driver = dlopen("libcuda.so.1", RTLD_LAZY);
    if (driver != NULL) {
        *(void **)&launch_kernel = dlsym(driver, "cuLaunchKernelEx");
        *(void **)&error_string = dlsym(driver, "cuGetErrorString");
        *(void **)&param_info = dlsym(driver, "cuFuncGetParamInfo");
    }
    if (!launch_kernel || !error_string || !param_info) {
        PyErr_SetString(PyExc_ImportError, "expected a driver of CUDA 12.4 or later, got no libcuda.so.1 or an older one");
        return NULL;
    }
    Py_RETURN_NONE;
}

/* state(): this thread's included and excluded keys as they are stored, and whether gradients are recorded. */
static PyObject *state(PyObject *module, PyObject *unused)
{
    return Py_BuildValue("KKO", (unsigned long long)local_keys.included, (unsigned long long)local_keys.excluded,
                         records_gradients() ? Py_True : Py_False);
}

static PyMethodDef functions[] = {
    {"setup", setup, METH_VARARGS, NULL},
    {"state", state, METH_NOARGS, NULL},
    {"bind", bind, METH_VARARGS, NULL},
    {"entry", entry, METH_VARARGS, NULL},
    {NULL},
};

static PyModuleDef definition = {PyModuleDef_HEAD_INIT, .m_name = "kda_native", .m_size = -1, .m_methods = functions};

PyMODINIT_FUNC PyInit_kda_native(void)
{
    str_enter = PyUnicode_InternFromString("launch_enter_hook");
    str_leave = PyUnicode_InternFromString("launch_exit_hook");
    str_requires_grad = PyUnicode_InternFromString("requires_grad");
    if (!str_enter || !str_leave || !str_requires_grad || PyType_Ready(&LaunchType) < 0 ||
        PyType_Ready(&EntryType) < 0)
        return NULL;
    PyObject *module = PyModule_Create(&definition);
    if (module != NULL && PyModule_AddObjectRef(module, "Launch", (PyObject *)&LaunchType) < 0)
        Py_CLEAR(module);
    return module;
}
