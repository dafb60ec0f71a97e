/* The least that the host pays for a call: allocate the op's outputs, launch an empty kernel. Nothing of Python, of a
 * framework's dispatcher, or of what solutions launch with is in it. The driver is reached as it is, and PyTorch's
 * allocator through the C interface that AOTInductor's compiled models use, whose symbols are promised to stay.
 */
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>

#define MOST_OUTPUTS 16

typedef struct {
    int64_t dims;
    const int64_t *sizes, *strides;
    int32_t dtype;
} Output;

typedef int (*Empty)(int64_t dims, const int64_t *sizes, const int64_t *strides, int32_t dtype, int32_t device_type,
                     int32_t device, void **tensor);
typedef int (*Address)(void *tensor, void **address);
typedef int (*Delete)(void *tensor);
typedef int (*LoadData)(void **module, const void *image);
typedef int (*GetFunction)(void **function, void *module, const char *name);
typedef int (*Launch)(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                      unsigned shared, void *stream, void **params, void **extra);

static Empty empty;
static Address address;
static Delete delete_tensor;
static Launch launch;
static void *function;

/* 0, or a code of the driver, or -1 where a symbol is missing. `torch` is a handle of libtorch_cpu. */
int prepare(void *torch, const char *ptx, const char *name)
{
    void *module, *driver = dlopen("libcuda.so.1", RTLD_NOW);
    empty = (Empty)dlsym(torch, "aoti_torch_empty_strided");
    address = (Address)dlsym(torch, "aoti_torch_get_data_ptr");
    delete_tensor = (Delete)dlsym(torch, "aoti_torch_delete_tensor_object");
    LoadData load = driver ? (LoadData)dlsym(driver, "cuModuleLoadData") : NULL;
    GetFunction get = driver ? (GetFunction)dlsym(driver, "cuModuleGetFunction") : NULL;
    launch = driver ? (Launch)dlsym(driver, "cuLaunchKernel") : NULL;
    if (!empty || !address || !delete_tensor || !load || !get || !launch)
        return -1;
    int code = load(&module, ptx);
    return code ? code : get(&function, module, name);
}

/* `count` calls on `stream`; 0, or a code of the driver, or -2 where an allocation failed. */
int run(int64_t count, const Output *outputs, int64_t number, int32_t device_type, int32_t device, void *stream)
{
    void *tensors[MOST_OUTPUTS], *addresses[MOST_OUTPUTS], *params[MOST_OUTPUTS];
    for (int64_t call = 0; call < count; call++) {
        for (int64_t i = 0; i < number; i++) {
            const Output *o = &outputs[i];
            if (empty(o->dims, o->sizes, o->strides, o->dtype, device_type, device, &tensors[i]) ||
                address(tensors[i], &addresses[i]))
                return -2;
            params[i] = &addresses[i];
        }
        int code = launch(function, 1, 1, 1, 32, 1, 1, 0, stream, params, NULL);
        if (code)
            return code;
        for (int64_t i = 0; i < number; i++)
            delete_tensor(tensors[i]);
    }
    return 0;
}
