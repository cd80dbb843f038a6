//! The driver as a C program sees it. Each case calls its functions in a child process; the test
//! then reads the child's books and journal.

use std::ffi::{CString, c_void};
use std::process::ExitCode;
use std::ptr::null_mut;

use firebox_blank::driver::api::devices::*;
use firebox_blank::driver::api::kernels::*;
use firebox_blank::driver::api::memory::*;
use firebox_blank::driver::api::streams::*;
use firebox_blank::driver::nvml::*;
use firebox_blank::driver::nvrtc::*;
use firebox_blank::driver::result;
use firebox_blank::{Blank, Books, Call, Completions, Device, Entry, Fault, KernelTimes, Settings};
use libtest_mimic::{Arguments, Failed, Trial};

const VARIABLE: &str = "FIREBOX_BLANK_CASE";
const MIB: usize = 1 << 20;

/// What a case runs in the child, on which machine, and what is checked afterwards.
struct Case {
    name: &'static str,
    settings: fn() -> Settings,
    child: fn(),
    check: fn(&Books, &[Entry]),
}

fn machine() -> Settings {
    let device = Device::new("test", 1 << 30, (8, 6), 20).with_context(100 << 20);
    Settings::new([device.clone(), device]).with_kernel_times(KernelTimes::None)
}

/// Begins a case: makes the first device's context current and returns a new stream.
fn begin() -> *mut c_void {
    let (mut context, mut stream) = (null_mut(), null_mut());
    // SAFETY: here and in all cases, every pointer refers to a local variable.
    unsafe {
        assert_eq!(cuInit(0), 0);
        assert_eq!(cuDevicePrimaryCtxRetain(&mut context, 0), 0);
        assert_eq!(cuCtxSetCurrent(context), 0);
        assert_eq!(cuStreamCreate(&mut stream, 1), 0);
    }
    stream
}

fn allocate(bytes: usize, stream: *mut c_void) -> Result<u64, u32> {
    let mut address = 0;
    match unsafe { cuMemAllocAsync(&mut address, bytes, stream) } {
        0 => Ok(address),
        error => Err(error),
    }
}

fn free_bytes() -> usize {
    let (mut free, mut total) = (0, 0);
    assert_eq!(unsafe { cuMemGetInfo_v2(&mut free, &mut total) }, 0);
    free
}

/// A kernel that takes two pointers and a number.
fn kernel() -> *mut c_void {
    let source = c"extern \"C\" __global__ void add(float* a, const float* b, const int n) {}";
    let (mut program, mut size, mut module, mut function) = (null_mut(), 0, null_mut(), null_mut());
    unsafe {
        assert_eq!(
            nvrtcCreateProgram(
                &mut program,
                source.as_ptr(),
                null_mut(),
                0,
                null_mut(),
                null_mut()
            ),
            0
        );
        assert_eq!(nvrtcCompileProgram(program, 0, null_mut()), 0);
        assert_eq!(nvrtcGetPTXSize(program, &mut size), 0);
        let mut text = vec![0; size];
        assert_eq!(nvrtcGetPTX(program, text.as_mut_ptr()), 0);
        assert_eq!(cuModuleLoadData(&mut module, text.as_ptr().cast()), 0);
        let name = CString::from(c"add");
        assert_eq!(cuModuleGetFunction(&mut function, module, name.as_ptr()), 0);
        assert_eq!(
            cuModuleGetFunction(&mut null_mut(), module, c"sub".as_ptr()),
            result::NOT_FOUND
        );
    }
    function
}

fn launch(function: *mut c_void, addresses: [u64; 2], stream: *mut c_void) -> u32 {
    let (mut a, mut b, mut n) = (addresses[0], addresses[1], 7i32);
    let mut arguments = [(&raw mut a).cast::<c_void>(), (&raw mut b).cast(), (&raw mut n).cast()];
    unsafe {
        cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, stream, arguments.as_mut_ptr(), null_mut())
    }
}

/// The misuses in the journal.
fn misuses(journal: &[Entry]) -> Vec<&str> {
    let told = |entry: &'_ Entry| match entry {
        Entry::Misuse { what_happened } => Some(what_happened.clone().leak() as &str),
        _ => None,
    };
    journal.iter().filter_map(told).collect()
}

const CASES: &[Case] = &[
    Case {
        name: "memory_is_counted",
        settings: machine,
        child: || {
            let stream = begin();
            let before = free_bytes();
            assert_eq!(before, 924 * MIB, "what the context leaves");
            let first = allocate(300 * MIB, stream).unwrap();
            let second = allocate(200 * MIB, stream).unwrap();
            assert_eq!(free_bytes(), before - 500 * MIB);
            assert_eq!(unsafe { cuMemFreeAsync(first, stream) }, 0);
            assert_eq!(free_bytes(), before - 200 * MIB);
            assert_eq!(allocate(800 * MIB, stream), Err(result::OUT_OF_MEMORY));
            assert_eq!(unsafe { cuMemFree_v2(second) }, 0);
            allocate(24 * MIB, stream).unwrap();
        },
        check: |books, journal| {
            let (first, second) = (books.device(0), books.device(1));
            assert_eq!((first.held(), first.peak()), (24 << 20, 500 << 20));
            assert_eq!((first.allocations(), first.frees(), first.refused()), (3, 2, 1));
            assert_eq!((second.peak(), second.context()), (0, 0));
            assert_eq!(books.calls(Call::cuMemAllocAsync), 4);
            let last = Entry::Ended { allocations: 1, bytes: 24 << 20 };
            assert_eq!(journal.last(), Some(&last));
            assert!(journal.contains(&Entry::Refused { device: 0, bytes: 800 << 20 }));
        },
    },
    Case {
        name: "books_are_there_after_a_crash",
        settings: machine,
        child: || {
            let stream = begin();
            allocate(7 * MIB, stream).unwrap();
            std::process::abort();
        },
        check: |books, journal| {
            assert_eq!(books.device(0).held(), 7 << 20);
            assert!(matches!(journal, [Entry::Allocated { .. }]), "{journal:?}");
        },
    },
    Case {
        name: "misuse_is_told",
        settings: machine,
        child: || {
            let stream = begin();
            let memory = allocate(1024, stream).unwrap();
            let gone = allocate(1024, stream).unwrap();
            let function = kernel();
            let mut host = [1u8; 2048];
            unsafe {
                assert_eq!(cuMemFreeAsync(gone, stream), 0);
                assert_eq!(cuMemFreeAsync(gone, stream), result::INVALID_VALUE);
                assert_eq!(cuMemFree_v2(4711), result::INVALID_VALUE);
                let (from, to) = (host.as_ptr().cast(), memory);
                assert_eq!(cuMemcpyHtoDAsync_v2(to, from, 1024, stream), 0);
                assert_eq!(cuMemcpyHtoDAsync_v2(to, from, 1025, stream), result::INVALID_VALUE);
                let to = host.as_mut_ptr().cast();
                assert_eq!(cuMemcpyDtoHAsync_v2(to, memory, 1024, stream), 0);
                assert_eq!(cuMemcpyDtoHAsync_v2(to, gone, 1, stream), result::INVALID_VALUE);
            }
            assert!(host[..1024].iter().all(|byte| *byte == 0) && host[1024] == 1);
            assert_eq!(launch(function, [memory, memory + 512], stream), 0);
            assert_eq!(launch(function, [memory, gone], stream), 0, "a kernel finds out late");
            let mut event = null_mut();
            unsafe {
                assert_eq!(cuEventCreate(&mut event, 0), 0);
                assert_eq!(cuEventRecord(event, stream), 0);
                assert_eq!(cuEventDestroy_v2(event), 0);
                assert_eq!(cuEventRecord(event, stream), result::INVALID_HANDLE);
                assert_eq!(cuStreamDestroy_v2(stream), 0);
            }
            assert_eq!(launch(function, [memory, memory], stream), result::INVALID_HANDLE);
        },
        check: |books, journal| {
            let told = misuses(journal);
            assert_eq!(told.len(), 7, "{told:?}");
            assert_eq!(books.device(0).misuses(), 7);
            assert_eq!(books.device(0).launches(), 2);
            assert!(told.iter().any(|told| told.contains("argument 1 of `add`")), "{told:?}");
            assert_eq!((books.device(0).streams_alive(), books.device(0).events_alive()), (0, 0));
        },
    },
    Case {
        name: "calls_fail_when_they_are_told_to",
        settings: || {
            let nth = Fault::call("cuStreamCreate", 3, Fault::OUT_OF_MEMORY);
            machine().with_fault(nth).with_fault(Fault::refuse(2))
        },
        child: || {
            let stream = begin();
            let create = || unsafe { cuStreamCreate(&mut null_mut(), 1) };
            assert_eq!([create(), create(), create()], [0, result::OUT_OF_MEMORY, 0]);
            allocate(MIB, stream).unwrap();
            assert_eq!(allocate(MIB, stream), Err(result::OUT_OF_MEMORY));
            // CubeCL retries without a stream. That is the same allocation.
            let mut address = 0;
            assert_eq!(unsafe { cuMemAlloc_v2(&mut address, MIB) }, result::OUT_OF_MEMORY);
            assert_eq!(unsafe { cuMemAlloc_v2(&mut address, MIB) }, 0);
            allocate(MIB, stream).unwrap();
        },
        check: |books, journal| {
            assert_eq!((books.device(0).allocations(), books.device(0).refused()), (3, 2));
            let faults = journal.iter().filter(|entry| matches!(entry, Entry::Fault { .. }));
            assert_eq!(faults.count(), 2);
        },
    },
    Case {
        name: "an_illegal_address_stays",
        settings: || {
            machine().with_fault(Fault::call("cuStreamSynchronize", 1, Fault::ILLEGAL_ADDRESS))
        },
        child: || {
            let stream = begin();
            assert_eq!(unsafe { cuStreamSynchronize(stream) }, result::ILLEGAL_ADDRESS);
            assert_eq!(unsafe { cuStreamSynchronize(stream) }, result::ILLEGAL_ADDRESS);
            assert_eq!(allocate(MIB, stream), Err(result::ILLEGAL_ADDRESS));
            // The other device keeps working.
            let (mut context, mut other) = (null_mut(), null_mut());
            unsafe {
                assert_eq!(cuDevicePrimaryCtxRetain(&mut context, 1), 0);
                assert_eq!(cuCtxSetCurrent(context), 0);
                assert_eq!(cuStreamCreate(&mut other, 1), 0);
            }
            allocate(MIB, other).unwrap();
        },
        check: |books, _| {
            assert_eq!((books.device(0).held(), books.device(1).held()), (0, 1 << 20))
        },
    },
    Case {
        name: "another_process_takes_memory_and_gives_it_back",
        settings: || {
            let taken = Fault::others_take(2, 900 << 20);
            let back = Fault { nth: 3, taken_by_others: Some(0), ..taken.clone() };
            machine().with_fault(taken).with_fault(back)
        },
        child: || {
            let stream = begin();
            allocate(MIB, stream).unwrap();
            assert_eq!(allocate(100 * MIB, stream), Err(result::OUT_OF_MEMORY));
            allocate(100 * MIB, stream).unwrap();
            // The test itself can take memory too, while the program runs.
            let books = Books::own().expect("this process has books");
            books.set_taken_by_others(0, 1 << 30);
            assert_eq!(allocate(MIB, stream), Err(result::OUT_OF_MEMORY));
        },
        check: |books, _| assert_eq!(books.device(0).refused(), 2),
    },
    Case {
        name: "late_frees_take_effect_in_the_streams_order",
        settings: || machine().with_completions(Completions::Late { microseconds: 300_000 }),
        child: || {
            let stream = begin();
            let mut other = null_mut();
            assert_eq!(unsafe { cuStreamCreate(&mut other, 1) }, 0);
            let memory = allocate(600 * MIB, stream).unwrap();
            assert_eq!(unsafe { cuMemFreeAsync(memory, stream) }, 0);
            assert_eq!(allocate(600 * MIB, other), Err(result::OUT_OF_MEMORY), "not there yet");
            let again = allocate(600 * MIB, stream).unwrap();
            assert_eq!(unsafe { cuMemFreeAsync(again, stream) }, 0);
            assert_eq!(unsafe { cuStreamSynchronize(stream) }, 0);
            allocate(600 * MIB, other).unwrap();
        },
        check: |books, _| assert_eq!(books.device(0).peak(), 600 << 20),
    },
    Case {
        name: "nvml_tells_who_holds_what",
        settings: machine,
        child: || {
            let stream = begin();
            allocate(50 * MIB, stream).unwrap();
            Books::own().expect("this process has books").set_taken_by_others(0, 10 << 20);
            let mut device = null_mut();
            let mut memory = Memory { total: 0, free: 0, used: 0 };
            let nobody = Process { pid: 0, used: 0, gpu_instance: 0, compute_instance: 0 };
            let (mut count, mut list) = (4, [nobody; 4]);
            unsafe {
                assert_eq!(nvmlInit_v2(), 0);
                assert_eq!(nvmlDeviceGetHandleByIndex_v2(0, &mut device), 0);
                assert_eq!(nvmlDeviceGetMemoryInfo(device, &mut memory), 0);
                let list = list.as_mut_ptr();
                assert_eq!(nvmlDeviceGetComputeRunningProcesses_v3(device, &mut count, list), 0);
            }
            assert_eq!((memory.total, memory.used), (1 << 30, 160 << 20));
            assert_eq!((count, list[0].pid, list[0].used), (2, std::process::id(), 150 << 20));
            assert_eq!(list[1].used, 10 << 20);
        },
        check: |_, journal| assert_eq!(misuses(journal), Vec::<&str>::new()),
    },
    Case {
        name: "pinned_memory_is_counted",
        settings: machine,
        child: || {
            begin();
            let mut pages = [null_mut(); 2];
            unsafe {
                assert_eq!(cuMemAllocHost_v2(&mut pages[0], 3 * MIB), 0);
                assert_eq!(cuMemAllocHost_v2(&mut pages[1], MIB), 0);
                pages[0].cast::<u8>().add(3 * MIB - 1).write(1);
                assert_eq!(cuMemFreeHost(pages[0]), 0);
                assert_eq!(cuMemFreeHost(pages[0]), result::INVALID_VALUE);
            }
        },
        check: |books, journal| {
            assert_eq!((books.pinned(), books.pinned_peak()), (1 << 20, 4 << 20));
            assert_eq!(misuses(journal).len(), 1);
        },
    },
];

fn run(case: &'static Case) -> Result<(), Failed> {
    let blank = Blank::install(&(case.settings)())?;
    let mut command = blank.command(std::env::current_exe()?);
    let child = command.env(VARIABLE, case.name).spawn()?;
    let process = child.id();
    let output = child.wait_with_output()?;
    let crashes = case.name.contains("crash");
    if output.status.success() == crashes {
        return Err(format!("the child ended with {}", output.status).into());
    }
    (case.check)(&blank.books_of(process)?, &blank.journal_of(process)?);
    Ok(())
}

fn main() -> ExitCode {
    if let Ok(name) = std::env::var(VARIABLE) {
        let case = CASES.iter().find(|case| case.name == name).expect("the test names its cases");
        (case.child)();
        return ExitCode::SUCCESS;
    }
    let tests = CASES.iter().map(|case| Trial::test(case.name, || run(case)));
    libtest_mimic::run(&Arguments::from_args(), tests.collect()).exit_code()
}
