//! A stub of NVRTC that reads the signature of a program's kernel and generates no code.
//!
//! Like the real NVRTC, it looks for the headers a program includes in the folders given as
//! options.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};

use super::api::kernels::COMPILER_VERSION;
use super::api::{c_functions, put, text};
use super::signature::Signature;
use super::state::Program;
use super::{Driver, driver};
use crate::books::Call;

/// The values of `nvrtcResult` returned here.
mod compiled {
    pub(super) const INVALID_INPUT: u32 = 3;
    pub(super) const INVALID_PROGRAM: u32 = 4;
    pub(super) const COMPILATION: u32 = 6;
    pub(super) const INTERNAL: u32 = 11;
}

/// The option that names a folder of headers.
const INCLUDE: &str = "--include-path=";

/// Saves a program for a compiler that generates code.
fn keep(folder: &Path, source: &str, options: &[String]) -> std::io::Result<()> {
    let options: Vec<&str> =
        options.iter().map(String::as_str).filter(|option| !option.starts_with(INCLUDE)).collect();
    let mut hasher = DefaultHasher::new();
    (source, &options).hash(&mut hasher);
    let name = format!("{:016x}", hasher.finish());
    std::fs::create_dir_all(folder)?;
    std::fs::write(folder.join(format!("{name}.options")), options.join("\n"))?;
    std::fs::write(folder.join(format!("{name}.cu")), source)
}

/// The reason a source does not compile, worded like the real NVRTC. `None` if it compiles.
fn fault_of(source: &str, options: &[String]) -> Option<String> {
    let folders: Vec<PathBuf> = options
        .iter()
        .filter_map(|option| option.strip_prefix(INCLUDE))
        .map(PathBuf::from)
        .collect();
    let is_there =
        |header: &str| folders.iter().any(|folder| folder.join(Path::new(header)).exists());
    let includes = source.lines().enumerate().filter_map(|(at, line)| {
        let header = line.trim().strip_prefix("#include")?.trim();
        Some((at + 1, header.trim_matches(|c| "<>\"".contains(c)).to_owned()))
    });
    for (line, header) in includes {
        if !is_there(&header) {
            return Some(format!(
                "default_program({line}): catastrophic error: cannot open source file \"{header}\"\n"
            ));
        }
    }
    None
}

impl Driver {
    fn compile(&self, program: u64, options: &[String]) -> Result<(), u32> {
        let mut state = self.state();
        let program = state.programs.get_mut(&program).ok_or(compiled::INVALID_PROGRAM)?;
        if let Some(folder) = &self.settings.sources {
            keep(folder, &program.source, options).map_err(|_| compiled::INTERNAL)?;
        }
        let signature = Signature::of_source(&program.source);
        let fault = fault_of(&program.source, options)
            .or_else(|| signature.is_none().then(|| "there is no kernel\n".to_owned()));
        if let Some(fault) = fault {
            program.log = CString::new(fault).unwrap_or_default();
            return Err(compiled::COMPILATION);
        }
        program.ptx = signature.and_then(|signature| CString::new(signature.module()).ok());
        Ok(())
    }

    /// Passes a text of a program to `use_it`.
    fn text_of(
        &self,
        program: *mut c_void,
        of: impl Fn(&Program) -> Option<&CString>,
        use_it: impl FnOnce(&CStr) -> Result<(), u32>,
    ) -> Result<(), u32> {
        let state = self.state();
        let program = state.programs.get(&(program as u64)).ok_or(compiled::INVALID_PROGRAM)?;
        use_it(of(program).ok_or(compiled::INVALID_PROGRAM)?)
    }
}

/// Begins a call. A fault becomes a compilation error of `nvrtcCompileProgram` and an internal
/// error of all other functions: its number is one of the driver's.
fn begin(call: Call) -> Result<&'static Driver, u32> {
    super::enter(call).map_err(|_| match driver() {
        Some(_) if call == Call::nvrtcCompileProgram => compiled::COMPILATION,
        _ => compiled::INTERNAL,
    })
}

fn copy_to(to: *mut c_char, text: &CStr) -> Result<(), u32> {
    if to.is_null() {
        return Err(compiled::INVALID_INPUT);
    }
    let bytes = text.to_bytes_with_nul();
    // SAFETY: the caller has asked for the size first.
    unsafe { to.cast::<u8>().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
    Ok(())
}

c_functions! {
    begin: begin;

    fn nvrtcVersion(_driver, major: *mut c_int, minor: *mut c_int) {
        put(major, COMPILER_VERSION.0)?;
        put(minor, COMPILER_VERSION.1)
    }

    fn nvrtcCreateProgram(
        driver, program: *mut *mut c_void, source: *const c_char, _name: *const c_char, _headers: c_int,
        _header_sources: *const *const c_char, _header_names: *const *const c_char,
    ) {
        let source = text(source).map_err(|_| compiled::INVALID_INPUT)?;
        let mut state = driver.state();
        let number = state.number();
        state.programs.insert(number, Program { source, ptx: None, log: CString::default() });
        put(program, number as *mut c_void)
    }

    fn nvrtcDestroyProgram(driver, program: *mut *mut c_void) {
        if program.is_null() {
            return Err(compiled::INVALID_PROGRAM);
        }
        // SAFETY: the caller passes a pointer to a program.
        let number = unsafe { program.read() } as u64;
        driver.state().programs.remove(&number).map(drop).ok_or(compiled::INVALID_PROGRAM)
    }

    fn nvrtcCompileProgram(driver, program: *mut c_void, count: c_int, options: *const *const c_char) {
        let count = usize::try_from(count).unwrap_or(0);
        // SAFETY: the caller passes `count` options.
        let options: Result<Vec<String>, u32> =
            (0..count).map(|at| text(unsafe { *options.add(at) })).collect();
        driver.compile(program as u64, &options.map_err(|_| compiled::INVALID_INPUT)?)
    }

    fn nvrtcGetPTXSize(driver, program: *mut c_void, size: *mut usize) {
        driver.text_of(program, |program| program.ptx.as_ref(), |ptx| put(size, ptx.count_bytes() + 1))
    }

    fn nvrtcGetPTX(driver, program: *mut c_void, to: *mut c_char) {
        driver.text_of(program, |program| program.ptx.as_ref(), |ptx| copy_to(to, ptx))
    }

    fn nvrtcGetProgramLogSize(driver, program: *mut c_void, size: *mut usize) {
        driver.text_of(program, |program| Some(&program.log), |log| put(size, log.count_bytes() + 1))
    }

    fn nvrtcGetProgramLog(driver, program: *mut c_void, to: *mut c_char) {
        driver.text_of(program, |program| Some(&program.log), |log| copy_to(to, log))
    }
}

/// `nvrtcGetErrorString`.
#[allow(non_snake_case, reason = "the name is C's")]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvrtcGetErrorString(result: u32) -> *const c_char {
    let text = match result {
        0 => c"NVRTC_SUCCESS",
        compiled::INVALID_INPUT => c"NVRTC_ERROR_INVALID_INPUT",
        compiled::INVALID_PROGRAM => c"NVRTC_ERROR_INVALID_PROGRAM",
        compiled::COMPILATION => c"NVRTC_ERROR_COMPILATION",
        _ => c"NVRTC_ERROR_INTERNAL_ERROR",
    };
    text.as_ptr()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_header_is_named() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("mma.h"), "").unwrap();
        let options = [format!("--include-path={}", folder.path().display())];
        assert_eq!(fault_of("#include <mma.h>\nint a;", &options), None);
        let fault = fault_of("#include <mma.h>\n#include <cuda_fp16.h>", &options).unwrap();
        assert!(
            fault.contains("default_program(2)") && fault.contains("\"cuda_fp16.h\""),
            "{fault}"
        );
        assert!(fault_of("#include <mma.h>", &[]).is_some());
    }

    #[test]
    fn programs_are_kept_without_the_folders_of_this_machine() {
        let folder = tempfile::tempdir().unwrap();
        let options = ["--gpu-architecture=sm_86".to_owned(), format!("{INCLUDE}/somewhere")];
        for source in ["int a;", "int a;", "int b;"] {
            keep(folder.path(), source, &options).unwrap();
        }
        let texts = std::fs::read_dir(folder.path())
            .unwrap()
            .map(|file| std::fs::read_to_string(file.unwrap().path()).unwrap());
        let mut texts: Vec<String> = texts.collect();
        texts.sort();
        let option = "--gpu-architecture=sm_86";
        assert_eq!(texts, [option, option, "int a;", "int b;"]);
    }
}
