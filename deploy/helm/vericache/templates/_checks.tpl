{{/*
What would start and then fail, or fail only when it matters, is stopped here, with a sentence that says what to change.
The schema has checked names, types and ranges before.
*/}}
{{- define "vericache.checks" -}}
{{- include "vericache.checkGPUs" . -}}
{{- include "vericache.checkMemory" . -}}
{{- include "vericache.checkShutdown" . -}}
{{- include "vericache.checkScaling" . -}}
{{- include "vericache.checkVolumes" . -}}
{{- include "vericache.checkSettings" . -}}
{{- include "vericache.checkNames" . -}}
{{- end }}

{{- define "vericache.checkGPUs" -}}
{{- $ranks := int .Values.server.tensorParallelSize -}}
{{- $gpus := int .Values.gpu.count -}}
{{- if eq .Values.device "cpu" -}}
{{- if or (ne $gpus 0) (ne $ranks 1) -}}
{{- fail (printf "device is cpu, but gpu.count is %d and server.tensorParallelSize is %d; set them to 0 and 1, or device to cuda" $gpus $ranks) -}}
{{- end -}}
{{- else if ne $gpus $ranks -}}
{{- fail (printf "server.tensorParallelSize is %d, but gpu.count is %d: each rank needs a GPU of its own, and further GPUs would idle; set both to the same number" $ranks $gpus) -}}
{{- end -}}
{{- if and (gt $ranks 1) (lt (float64 .Values.memory.sharedGib) 1.0) -}}
{{- fail (printf "memory.sharedGib is %v, but the %d ranks of server.tensorParallelSize exchange data in /dev/shm; set it to at least 1" .Values.memory.sharedGib $ranks) -}}
{{- end -}}
{{- range $which := list "requests" "limits" -}}
{{- if hasKey (default dict (get $.Values.resources $which)) $.Values.gpu.resourceName -}}
{{- fail (printf "resources.%s names %s, which gpu.count sets; remove it there" $which $.Values.gpu.resourceName) -}}
{{- end -}}
{{- end -}}
{{- end }}

{{- define "vericache.checkMemory" -}}
{{- $kv := mulf (float64 .Values.vericache.host_memory_gib) (float64 .Values.server.tensorParallelSize) -}}
{{- $needed := addf $kv (float64 .Values.memory.sharedGib) (float64 .Values.memory.headroomGib) -}}
{{- $terms := printf "vericache.host_memory_gib (%v) x server.tensorParallelSize (%v) + memory.sharedGib (%v) + memory.headroomGib (%v)" .Values.vericache.host_memory_gib .Values.server.tensorParallelSize .Values.memory.sharedGib .Values.memory.headroomGib -}}
{{- if eq .Values.device "cpu" -}}
{{- $device := float64 (default 0 .Values.server.kvCacheMemoryGib) -}}
{{- $needed = addf $needed $device -}}
{{- $terms = printf "%s + server.kvCacheMemoryGib (%v), which on a CPU is host memory too," $terms $device -}}
{{- end -}}
{{- $requests := default dict .Values.resources.requests -}}
{{- $limits := default dict .Values.resources.limits -}}
{{- if not (or $requests.memory $limits.memory) -}}
{{- fail (printf "resources.requests.memory is not set: the pod could land on a node that lacks the %v GiB it needs (%s); set it to at least %vGi" $needed $terms (ceil $needed)) -}}
{{- end -}}
{{- range $which, $amounts := dict "requests" $requests "limits" $limits -}}
{{- if $amounts.memory -}}
{{- if lt (float64 (include "vericache.gib" $amounts.memory)) $needed -}}
{{- fail (printf "resources.%s.memory is %v, but %s = %v GiB; set it to at least %vGi, or lower vericache.host_memory_gib" $which $amounts.memory $terms $needed (ceil $needed)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $added := default list (default dict .Values.containerSecurityContext.capabilities).add -}}
{{- if and .Values.memory.memlockGib (eq .Values.device "cuda") (not (has "IPC_LOCK" $added)) -}}
{{- if lt (float64 .Values.memory.memlockGib) (float64 .Values.vericache.host_memory_gib) -}}
{{- fail (printf "memory.memlockGib is %v, but a process locks vericache.host_memory_gib (%v) in memory; raise the nodes' limit (LimitMEMLOCK of the container runtime), add IPC_LOCK to containerSecurityContext.capabilities.add, or lower vericache.host_memory_gib" .Values.memory.memlockGib .Values.vericache.host_memory_gib) -}}
{{- end -}}
{{- end -}}
{{- end }}

{{- define "vericache.checkShutdown" -}}
{{- $least := add .Values.preStopSleepSeconds .Values.server.shutdownTimeoutSeconds 10 -}}
{{- if lt (int (include "vericache.gracePeriod" .)) (int $least) -}}
{{- fail (printf "terminationGracePeriodSeconds is %v, but preStopSleepSeconds (%v) + server.shutdownTimeoutSeconds (%v) + 10 for the processes to end = %d: running requests would be killed; raise it to at least %d, or lower server.shutdownTimeoutSeconds" .Values.terminationGracePeriodSeconds .Values.preStopSleepSeconds .Values.server.shutdownTimeoutSeconds $least $least) -}}
{{- end -}}
{{- range $name := list "startup" "liveness" -}}
{{- $probe := get $.Values.probes $name -}}
{{- if ne (int $probe.successThreshold) 1 -}}
{{- fail (printf "probes.%s.successThreshold is %v, Kubernetes allows 1 only; set it to 1" $name $probe.successThreshold) -}}
{{- end -}}
{{- end -}}
{{- if .Values.probes.readiness.terminationGracePeriodSeconds -}}
{{- fail "probes.readiness.terminationGracePeriodSeconds is set, but a readiness probe ends no pod; remove it" -}}
{{- end -}}
{{- end }}

{{- define "vericache.checkScaling" -}}
{{- $scaling := .Values.autoscaling -}}
{{- if and $scaling.hpa.enabled $scaling.keda.enabled -}}
{{- fail "autoscaling.hpa and autoscaling.keda are both enabled, but KEDA makes an autoscaler of its own and the two would fight; disable one" -}}
{{- end -}}
{{- range $name := list "hpa" "keda" -}}
{{- $each := get $scaling $name -}}
{{- if and $each.enabled (gt (int $each.minReplicas) (int $each.maxReplicas)) -}}
{{- fail (printf "autoscaling.%s.minReplicas is %v, more than maxReplicas (%v); change one of them" $name $each.minReplicas $each.maxReplicas) -}}
{{- end -}}
{{- end -}}
{{- if and (eq (int .Values.strategy.maxSurge) 0) (eq (int .Values.strategy.maxUnavailable) 0) -}}
{{- fail "strategy.maxSurge and strategy.maxUnavailable are both 0: no upgrade could begin; set one to 1" -}}
{{- end -}}
{{- if and .Values.monitoring.serviceMonitor.enabled .Values.monitoring.podMonitor.enabled -}}
{{- fail "monitoring.serviceMonitor and monitoring.podMonitor are both enabled: every series would be there twice; disable one" -}}
{{- end -}}
{{- end }}

{{- define "vericache.checkVolumes" -}}
{{- if .Values.persistence.enabled -}}
{{- $pods := int .Values.replicas -}}
{{- range list .Values.autoscaling.hpa .Values.autoscaling.keda -}}
{{- if .enabled -}}{{- $pods = int .maxReplicas -}}{{- end -}}
{{- end -}}
{{- $most := add $pods (int .Values.strategy.maxSurge) -}}
{{- if and (eq .Values.persistence.accessMode "ReadWriteOnce") (gt (int $most) 1) -}}
{{- fail (printf "persistence.accessMode is ReadWriteOnce, which one node can mount, but there can be %d pods (replicas, or an autoscaler's maxReplicas, + strategy.maxSurge); use ReadWriteMany, or one replica with strategy.maxSurge 0 and strategy.maxUnavailable 1" $most) -}}
{{- end -}}
{{- end -}}
{{- $writable := list "/tmp" "/cache" -}}
{{- if .Values.persistence.enabled -}}{{- $writable = append $writable .Values.persistence.mountPath -}}{{- end -}}
{{- range .Values.extraVolumeMounts -}}{{- $writable = append $writable .mountPath -}}{{- end -}}
{{- with .Values.vericache.audit_folder -}}
{{- $folder := . -}}
{{- $found := false -}}
{{- range $writable -}}{{- if hasPrefix (printf "%s/" (trimSuffix "/" .)) (printf "%s/" $folder) -}}{{- $found = true -}}{{- end -}}{{- end -}}
{{- if not $found -}}
{{- fail (printf "vericache.audit_folder is %s, but the root file system is read-only and no volume is mounted there; add one to extraVolumes and extraVolumeMounts, or use one of %s" $folder (join ", " $writable)) -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* The ones a pod would only tell about after its image is pulled; VeriCacheConfig checks the same, and more. */}}
{{- define "vericache.checkSettings" -}}
{{- with .Values.vericache -}}
{{- if gt (int .draft_length) (sub (int .window) 2 | int) -}}
{{- fail (printf "vericache.draft_length is %v, but a window of %v iterations holds at most %d drafts and a verify; raise vericache.window or lower vericache.draft_length" .draft_length .window (sub (int .window) 2)) -}}
{{- end -}}
{{- if lt (int .verify_tokens) (int .window) -}}
{{- fail (printf "vericache.verify_tokens is %v, expected at least vericache.window (%v), the longest verify; raise it" .verify_tokens .window) -}}
{{- end -}}
{{- if and .ratio_limit (lt (float64 (default 1 .ratio_limit)) (float64 .ratio)) -}}
{{- fail (printf "vericache.ratio_limit is %v, expected at least vericache.ratio (%v); raise it or remove it" .ratio_limit .ratio) -}}
{{- end -}}
{{- end -}}
{{- end }}

{{- define "vericache.checkNames" -}}
{{- $own := include "vericache.selectorLabels" . | fromYaml -}}
{{- range $where := list "commonLabels" "podLabels" -}}
{{- range $label := keys (get $.Values $where) | sortAlpha -}}
{{- if or (hasKey $own $label) (has $label (list "app.kubernetes.io/version" "app.kubernetes.io/managed-by" "helm.sh/chart")) -}}
{{- fail (printf "%s sets %s, which the chart sets itself, and selectors match by; remove it (nameOverride changes the name)" $where $label) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $flags := dict "--model" "server.model" "--revision" "server.revision" "--served-model-name" "server.servedModelName" "--max-model-len" "server.maxModelLen" "--max-num-seqs" "server.maxNumSeqs" "--dtype" "server.dtype" "--tensor-parallel-size" "server.tensorParallelSize" "-tp" "server.tensorParallelSize" "--gpu-memory-utilization" "server.gpuMemoryUtilization" "--device-memory-utilization" "server.gpuMemoryUtilization" "--kv-cache-memory-bytes" "server.kvCacheMemoryGib" "--shutdown-timeout" "server.shutdownTimeoutSeconds" "--api-key" "server.apiKeySecret" "--hf-token" "server.hubTokenSecret" "--port" "service.port (the container's is 8000)" "--host" "nothing (it listens on all addresses)" "--config" "the values themselves" -}}
{{- range .Values.server.extraArgs -}}
{{- $flag := first (splitList "=" .) | replace "_" "-" -}}
{{- if hasPrefix "--vericache-" $flag -}}
{{- fail (printf "server.extraArgs has %s; set vericache.%s instead" . (trimPrefix "--vericache-" $flag | replace "-" "_")) -}}
{{- end -}}
{{- $argument := . -}}
{{- range $known, $instead := $flags -}}
{{- /* argparse takes a flag's first letters for the flag. */ -}}
{{- if and (hasPrefix "-" $flag) (or (eq $known $flag) (and (hasPrefix "--" $flag) (gt (len $flag) 2) (hasPrefix $flag $known))) -}}
{{- fail (printf "server.extraArgs has %s, which the chart passes itself; set %s instead" $argument $instead) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $taken := include "vericache.environment" . | fromYamlArray -}}
{{- range $variable := .Values.server.extraEnv -}}
{{- if hasPrefix "VERICACHE_" $variable.name -}}
{{- fail (printf "server.extraEnv sets %s, which would win over the values; set vericache.%s instead" $variable.name (trimPrefix "VERICACHE_" $variable.name | lower)) -}}
{{- end -}}
{{- range $taken -}}
{{- if eq .name $variable.name -}}
{{- fail (printf "server.extraEnv sets %s, which the chart sets itself; remove it" $variable.name) -}}
{{- end -}}
{{- end -}}
{{- if has $variable.name (list "VLLM_API_KEY" "HF_TOKEN" "HUGGING_FACE_HUB_TOKEN") -}}
{{- fail (printf "server.extraEnv sets %s; name its Secret in server.apiKeySecret or server.hubTokenSecret instead" $variable.name) -}}
{{- end -}}
{{- if and (regexMatch "(?i)(key|token|secret|passw|credential)" $variable.name) (hasKey $variable "value") -}}
{{- fail (printf "server.extraEnv holds %s in plain text, for everybody who may read the Deployment; put it into a Secret and use valueFrom.secretKeyRef" $variable.name) -}}
{{- end -}}
{{- end -}}
{{- end }}
