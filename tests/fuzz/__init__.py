"""A seeded fuzz of everything that is read from a model: GGUF files, safetensors, JSON files, templates.

image       a GGUF file as it is laid out, in which every count, length, type and offset can lie
bases       small whole models of every architecture, tensor type and kind of vocabulary
edits_*     what is done to them: edits that know the structure, and edits that know nothing
mutants     a mutant is a function of (seed, number): some base, and one to four edits
use         opens a mutant as a user would and says how it ended; anything but a working model or an error that
            forerun raises on purpose is a failure
fleet       runs many mutants in processes that are watched for time, memory and crashes
"""
